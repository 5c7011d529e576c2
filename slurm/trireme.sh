#!/bin/bash
# Runs one rank: one task of a Slurm step, started by srun in trireme.sub.
#
# SLURM_PROCID is the rank. The job id in the prefix separates jobs that share a node's /dev/shm. scancel kills a task after the
# site's KillWait, by default 30 s, so requests in flight get less time than that.
repository=$1
shift
exec "${TRIREME:-target/release/trireme}" rank --model-repository="$repository" \
    --backend-config="python,shm-region-prefix-name=prefix${SLURM_JOB_ID}_${SLURM_PROCID}_" \
    --exit-timeout-secs=25 "$@"
