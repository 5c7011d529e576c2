#!/bin/bash
# One task of a Slurm step: one rank. Run by srun, see trireme.sub.
#
# SLURM_PROCID is the rank. The job's number keeps two jobs that share a node apart in /dev/shm. scancel kills what has
# not ended after the site's KillWait, 30 s unless it says otherwise, so requests in flight get less.
repository=$1
shift
exec "${TRIREME:-target/release/trireme}" rank --model-repository="$repository" \
    --backend-config="python,shm-region-prefix-name=prefix${SLURM_JOB_ID}_${SLURM_PROCID}_" \
    --exit-timeout-secs=25 "$@"
