//! `--elastic`: the sizes that a world may have while hosts are lost.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::command::Starter;
use crate::flags::WorldFlags;
use crate::hosts::{self, Host};
use crate::mpi::MpiKind;
use crate::plan::{Plan, Site, memory_command};

/// The number of ranks of a world, and where they run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) world_size: u32,
    /// The hosts in the order of ranks, each with its number of ranks.
    pub(crate) hosts: Vec<Host>,
}

impl Shape {
    /// The flags and the site of a world of this shape.
    pub(crate) fn apply(&self, flags: &WorldFlags, site: &Site) -> (WorldFlags, Site) {
        let flags = WorldFlags { world_size: self.world_size, ..flags.clone() };
        (flags, Site { hosts: self.hosts.clone(), ..site.clone() })
    }

    pub(crate) fn has(&self, host: &str) -> bool {
        self.hosts.iter().any(|its| its.name == host)
    }

    /// The host of a rank.
    pub(crate) fn host_of(&self, rank: u32) -> Option<&str> {
        let mut end = 0;
        let is_its = |host: &&Host| {
            end += host.slots.unwrap_or(0);
            rank < end
        };
        self.hosts.iter().find(is_its).map(|host| host.name.as_str())
    }
}

/// The part of `trireme plan --json` that is used.
#[derive(Deserialize)]
struct Layouts {
    models: Vec<Layout>,
}

#[derive(Deserialize)]
struct Layout {
    replicas: u64,
}

/// The sizes that a world may have, and the hosts that may run its ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shapes {
    /// Numbers of ranks, the largest first; the first is that of `--world_size`.
    sizes: Vec<u32>,
    /// Names of hosts, the first of which is this one, with the number of ranks that each takes at most.
    rooms: Vec<(String, u32)>,
    /// The sizes in which the other replicas can go on when one loses a rank.
    replicated: Vec<u32>,
}

impl Shapes {
    /// The shapes that the flags allow; None without `--elastic`. `plan` is that of the whole world.
    ///
    /// # Errors
    /// When they contradict each other, with the flag to change.
    pub(crate) fn new(flags: &WorldFlags, plan: &Plan) -> Result<Option<Self>> {
        let Some(largest) = flags.elastic.first() else { return Ok(None) };
        let list = flags.elastic.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        if *largest >= flags.world_size {
            bail!(
                "--elastic={list} lists the smaller worlds that are allowed while hosts are lost, and --world_size is {}; \
                 leave {largest} out",
                flags.world_size
            );
        }
        if let Some(at) = (1..flags.elastic.len()).find(|&at| flags.elastic[at] >= flags.elastic[at - 1]) {
            bail!(
                "--elastic={list} has {} behind {}; write each number of ranks once, the largest first",
                flags.elastic[at],
                flags.elastic[at - 1]
            );
        }
        if matches!(plan.starter, Starter::Srun { .. }) {
            bail!(
                "--elastic works through mpirun, not through srun: Slurm starts no other step on a node while one that has lost a node \
                 is not over; leave it out"
            );
        }
        if flags.exit_on_failure || flags.max_restarts == Some(0) {
            bail!(
                "--elastic starts a world again that has lost a host; leave out --exit_on_failure and --max_restarts=0"
            );
        }
        if plan.hosts.len() < 2 {
            bail!(
                "--elastic={list} is for worlds of several hosts, and this one has a single one; name them with --hosts or \
                 --hostfile, or leave --elastic out"
            );
        }
        let first = &plan.hosts[0].name;
        if !hosts::is_here(first) {
            bail!(
                "--elastic needs rank 0 on this machine, so that clients find it at the same address whatever is lost, and it runs \
                 on `{first}`; start `launch` there, or name this machine first"
            );
        }
        let rooms = hosts::rooms(&plan.hosts, flags.world_size, flags.ranks_per_node);
        let names = plan.hosts.iter().map(|host| host.name.clone());
        let shapes = Self {
            sizes: std::iter::once(flags.world_size).chain(flags.elastic.iter().copied()).collect(),
            rooms: names.zip(rooms).collect(),
            replicated: Vec::new(),
        };
        // Any host but this one may be lost, so a size that fits only all hosts would never be used.
        let most = shapes.rooms.iter().map(|&(_, room)| room).sum::<u32>();
        let least = shapes.rooms[1..].iter().map(|&(_, room)| room).min().unwrap_or(0);
        if *largest > most - least {
            bail!(
                "--elastic={list}: {largest} ranks do not fit the hosts that are left when one is lost, which have room for {}",
                most - least
            );
        }
        Ok(Some(shapes))
    }

    #[cfg(test)]
    pub(crate) fn of(sizes: &[u32], rooms: &[(&str, u32)]) -> Self {
        let rooms = rooms.iter().map(|&(name, room)| (name.to_owned(), room)).collect();
        Self { sizes: sizes.to_vec(), rooms, replicated: Vec::new() }
    }

    /// The same, with the sizes in which each model has several replicas. Only the `mpirun` of Open MPI up to 4 keeps a world of which a rank
    /// dies.
    pub(crate) fn with_replicas(mut self, starter: &Starter, flags: &WorldFlags, site: &Site) -> Self {
        if *starter == Starter::Mpirun(MpiKind::OpenMpi) {
            let shapes = self.sizes.iter().filter_map(|&size| self.largest(size, |_| true));
            let replicated = shapes.filter(|shape| has_replicas(shape, flags, site)).map(|shape| shape.world_size);
            self.replicated = replicated.collect();
        }
        self
    }

    /// Whether the other replicas of a world of this size go on when one loses a rank.
    pub(crate) fn is_replicated(&self, world_size: u32) -> bool {
        self.replicated.contains(&world_size)
    }

    /// Names of the other hosts.
    pub(crate) fn others(&self) -> impl Iterator<Item = &str> {
        self.rooms.iter().map(|(name, _)| name.as_str()).filter(|name| !hosts::is_here(name))
    }

    /// The number of ranks of the whole world.
    pub(crate) fn full_size(&self) -> u32 {
        self.sizes[0]
    }

    /// The largest shape of at most `limit` ranks on the hosts for which `is_usable` holds: each is filled before the next one.
    pub(crate) fn largest(&self, limit: u32, is_usable: impl Fn(&str) -> bool) -> Option<Shape> {
        let usable: Vec<_> = self.rooms.iter().filter(|(name, _)| is_usable(name)).collect();
        let room: u32 = usable.iter().map(|&&(_, room)| room).sum();
        let world_size = *self.sizes.iter().find(|&&size| size <= limit && size <= room)?;
        let mut left = world_size;
        let hosts = usable.iter().map_while(|(name, room)| {
            let count = left.min(*room);
            left -= count;
            (count > 0).then(|| Host { name: name.clone(), slots: Some(count) })
        });
        Some(Shape { world_size, hosts: hosts.collect() })
    }

    /// Checks that the memory suffices for each smaller world, if every host is like this one.
    ///
    /// # Errors
    /// The first size for which it does not, with what `trireme plan` prints.
    pub(crate) fn check_memory(&self, flags: &WorldFlags, site: &Site) -> Result<()> {
        for &size in &self.sizes[1..] {
            let Some(shape) = self.largest(size, |_| true) else { continue };
            let (flags, site) = shape.apply(flags, site);
            let command = memory_command(&flags, &site);
            let output = Command::new(&command.program).args(&command.args).stdin(Stdio::null()).output();
            let output = output.with_context(|| format!("cannot start {}", command.program.display()))?;
            if !output.status.success() {
                let text = [output.stdout, output.stderr].concat();
                let all = self.sizes[1..].iter().map(u32::to_string).collect::<Vec<_>>().join(",");
                bail!(
                    "--elastic={all}: a world of {size} rank(s) could not serve these models, so leave {size} out; its plan:\n{}",
                    String::from_utf8_lossy(&text).trim_end()
                );
            }
        }
        Ok(())
    }
}

/// Whether each model has several replicas in a world of this shape. If the server program does not say, it counts as having one.
fn has_replicas(shape: &Shape, flags: &WorldFlags, site: &Site) -> bool {
    let (flags, site) = shape.apply(flags, site);
    let command = memory_command(&flags, &site);
    let mut command = {
        let mut plan = Command::new(&command.program);
        plan.args(&command.args).arg("--json");
        plan
    };
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output();
    let layouts = output.ok().and_then(|output| serde_json::from_slice::<Layouts>(&output.stdout).ok());
    layouts.is_some_and(|Layouts { models }| !models.is_empty() && models.iter().all(|model| model.replicas > 1))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::flags::Flags;
    use crate::plan::plan;
    use crate::srun::Allocation;

    /// The shapes of a world whose first host is this one, under the name `here`.
    fn shapes(line: &str) -> Result<Shapes> {
        let here = nix::unistd::gethostname().unwrap().to_string_lossy().into_owned();
        let words =
            std::iter::once("launch".to_owned()).chain(line.split_whitespace().map(|word| word.replace("here", &here)));
        let flags = Flags::parse_from_line(words.map(OsString::from))?.world;
        let site = Site { num_cores: 64, hosts: hosts::of_flags(&flags)?, ..Site::default() };
        Ok(Shapes::new(&flags, &plan(&flags, &site)?)?.expect("--elastic is given"))
    }

    fn largest(shapes: &Shapes, limit: u32, lost: &[&str]) -> Option<String> {
        let shape = shapes.largest(limit, |host| !lost.contains(&host))?;
        let placed: Vec<_> =
            shape.hosts[1..].iter().map(|host| format!("{}:{}", host.name, host.slots.unwrap())).collect();
        Some(
            format!("{} on here:{} {}", shape.world_size, shape.hosts[0].slots.unwrap(), placed.join(" "))
                .trim_end()
                .to_owned(),
        )
    }

    #[test]
    fn the_largest_allowed_size_that_fits_the_hosts_that_are_left_is_chosen() {
        let three = shapes("--world_size=24 --hosts=here:8,b:8,c:8 --elastic=16,8,4").unwrap();
        let of = |limit, lost: &[&str]| largest(&three, limit, lost).unwrap();
        assert_eq!(of(24, &[]), "24 on here:8 b:8 c:8");
        assert_eq!(of(24, &["b"]), "16 on here:8 c:8");
        assert_eq!(of(24, &["b", "c"]), "8 on here:8");
        // Hosts that are not needed are left out.
        assert_eq!(
            (of(16, &[]), of(15, &[]), of(7, &[])),
            ("16 on here:8 b:8".into(), "8 on here:8".into(), "4 on here:4".into())
        );
        assert_eq!(largest(&three, 3, &[]), None);

        // Without numbers, a host takes its share of the whole world, and no more when it is alone.
        let even = shapes("--world_size=4 --hosts=here,b --elastic=3,1");
        assert!(even.unwrap_err().to_string().contains("3 ranks do not fit the hosts that are left when one is lost"));
        let even = shapes("--world_size=4 --hosts=here,b --elastic=2,1").unwrap();
        assert_eq!(largest(&even, 4, &["b"]).unwrap(), "2 on here:2");
        assert_eq!(even.others().collect::<Vec<_>>(), ["b"]);
        // Slots that the whole world leaves free take ranks of a lost host.
        let uneven = shapes("--world_size=6 --hosts=here:4,b:4,c:4 --ranks_per_node=4 --elastic=4");
        assert!(uneven.unwrap_err().to_string().contains("host `c` gets no rank"));
        let spare = shapes("--world_size=10 --hosts=here:4,b:4,c:4 --elastic=8").unwrap();
        assert_eq!(largest(&spare, 10, &["b"]).unwrap(), "8 on here:4 c:4");
    }

    #[test]
    fn lists_that_contradict_the_other_flags_are_refused_by_name() {
        let refusal = |line: &str| shapes(line).unwrap_err().to_string();
        for (line, words) in [
            ("--world_size=4 --hosts=here:2,b:2 --elastic=4,2", "--elastic=4,2 lists the smaller worlds"),
            ("--world_size=8 --hosts=here:4,b:4 --elastic=2,4", "--elastic=2,4 has 4 behind 2; write each"),
            ("--world_size=8 --hosts=here:4,b:4 --elastic=4,4", "has 4 behind 4"),
            ("--world_size=4 --elastic=2", "is for worlds of several hosts"),
            ("--world_size=4 --hosts=here:4 --elastic=2", "is for worlds of several hosts"),
            ("--world_size=4 --hosts=other:2,here:2 --elastic=2", "it runs on `other`"),
            ("--world_size=4 --hosts=here:2,b:2 --elastic=2 --exit_on_failure", "leave out --exit_on_failure"),
            ("--world_size=4 --hosts=here:2,b:2 --elastic=2 --max_restarts=0", "leave out --exit_on_failure"),
        ] {
            assert!(refusal(line).contains(words), "{line}: {}", refusal(line));
        }
        let line = "launch --world_size=2 --elastic=1";
        let flags = Flags::parse_from_line(line.split(' ').map(OsString::from)).unwrap().world;
        let nodes = ["n1", "n2"].map(str::to_owned).to_vec();
        let allocation = Some(Allocation { job: 7, nodes, mpi_types: ["pmix".to_owned()].into(), node: None });
        let plan = plan(&flags, &Site { num_cores: 64, allocation, ..Site::default() }).unwrap();
        let refusal = Shapes::new(&flags, &plan).unwrap_err().to_string();
        assert!(refusal.contains("--elastic works through mpirun, not through srun"), "{refusal}");
        for line in ["--elastic=0", "--elastic=x", "--elastic=", "--elastic_return=0"] {
            assert!(shapes(&format!("--world_size=4 --hosts=here:2,b:2 {line}")).is_err(), "{line}");
        }
    }
}
