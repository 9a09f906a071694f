//! This process's place in a job, from the environment that launchers set.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use farwire_proto::{Peer, WorldSize};

/// This process's place in a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its rank.
    pub rank: Peer,
    /// How many processes there are.
    pub world: WorldSize,
    /// Where rank 0 listens: a host name or address.
    pub master_host: String,
    /// The UDP port that it listens on.
    pub master_port: u16,
    /// The launcher's name for the job, if it has one. The same on all ranks.
    pub job: Option<String>,
    /// The launcher that said so.
    pub source: &'static str,
}

impl Place {
    /// Whether all processes are on this host, as far as the address of rank 0 tells.
    pub(crate) fn is_local(&self) -> bool {
        self.master_host == "localhost"
            || self.master_host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
    }

    /// The place of a process that joins a running job, at the address of one of its members.
    pub(crate) fn to_join(address: &str) -> Result<Self, EnvError> {
        let wrong = || EnvError::Value {
            name: "address to join",
            value: address.to_owned(),
            what: "a host and a port, like 10.0.0.1:29500 or [::1]:29500",
        };
        let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let master_port = port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
        if host.is_empty() {
            return Err(wrong());
        }
        Ok(Self {
            rank: Peer(u32::MAX),
            world: WorldSize::new(1).expect("one is not zero"),
            master_host: host.to_owned(),
            master_port,
            job: None,
            source: "the address to join",
        })
    }
}

/// Why the environment does not say which place this process has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    /// No launcher's variables are set.
    #[error(
        "no launcher has said which rank this is; start it with \
         `farwire launch -n 4 -- COMMAND`, torchrun, mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )]
    Nothing,
    /// A variable is missing that belongs with one that is set.
    #[error("{0} is not set, but {1} is; set both, or neither")]
    Missing(&'static str, &'static str),
    /// A value does not parse.
    #[error("{name}={} is not {what}", shown(value))]
    Value {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        what: &'static str,
    },
    /// The rank is not in the world.
    #[error("{rank_name}={rank} is not below {size_name}={size}; ranks count from 0")]
    OutOfRange {
        /// The variable with the rank.
        rank_name: &'static str,
        /// Its value.
        rank: u32,
        /// The variable with the size.
        size_name: &'static str,
        /// Its value.
        size: u32,
    },
}

/// A value as it is shown: escaped, and not longer than a line.
pub(super) fn shown(value: &str) -> String {
    match value.char_indices().nth(60) {
        None => format!("{value:?}"),
        Some((end, _)) => format!("{:?}… ({} bytes)", &value[..end], value.len()),
    }
}

/// Every rank is connected to every other, so beyond this a typing error is likelier than a job.
const MOST_RANKS: u32 = 1 << 16;

/// A launcher, and the variables by which it is known.
struct Launcher {
    source: &'static str,
    rank: &'static str,
    size: &'static str,
    /// Variables with the job's name, the same for all ranks: the first of these that is set, its
    /// parts with dots between. Where MASTER_PORT is not set, ranks derive a port from it.
    job: &'static [&'static [&'static str]],
}

/// In the order they are looked for: first what a user may set by hand, and launchers that run
/// inside others.
const LAUNCHERS: [Launcher; 5] = [
    Launcher {
        source: "torchrun",
        rank: "RANK",
        size: "WORLD_SIZE",
        job: &[&["TORCHELASTIC_RUN_ID"]],
    },
    Launcher {
        source: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        job: &[&["PMIX_NAMESPACE"], &["OMPI_MCA_ess_base_jobid"]],
    },
    Launcher {
        source: "Slurm",
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        job: &[&["SLURM_JOB_ID", "SLURM_STEP_ID"]],
    },
    // PMI_ID is not the job's name: some launchers set it, and differently for each process.
    Launcher { source: "PMI", rank: "PMI_RANK", size: "PMI_SIZE", job: &[&["PMI_JOBID"]] },
    Launcher {
        source: KUBERNETES,
        rank: "JOB_COMPLETION_INDEX",
        size: "JOB_COMPLETIONS",
        job: &[],
    },
];

const KUBERNETES: &str = "a Kubernetes indexed job";

impl Launcher {
    fn job(&self, lookup: &dyn Fn(&str) -> Option<String>, rank: u32) -> Option<String> {
        if self.source == KUBERNETES {
            // A pod of an indexed job is named after the job and its index.
            let pod = lookup("HOSTNAME")?;
            let job = pod.strip_suffix(&format!("-{rank}"))?;
            return (!job.is_empty()).then(|| job.to_owned());
        }
        self.job.iter().find_map(|names| {
            let parts: Vec<_> = names.iter().map_while(|name| lookup(name)).collect();
            // torchrun says "none" if it was given no name.
            Some(parts.join(".")).filter(|job| !job.is_empty() && job != "none")
        })
    }
}

impl Place {
    /// Reads this process's place from its environment.
    pub fn from_env() -> Result<Self, EnvError> {
        Self::from_lookup(&|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    /// Reads a place from an environment.
    pub(crate) fn from_lookup(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self, EnvError> {
        let launcher = LAUNCHERS.iter().find(|launcher| lookup(launcher.rank).is_some());
        let Some(launcher) = launcher else {
            let half = LAUNCHERS
                .iter()
                .find(|launcher| launcher.source == "torchrun" && lookup(launcher.size).is_some());
            return Err(half.map_or(EnvError::Nothing, |launcher| {
                EnvError::Missing(launcher.rank, launcher.size)
            }));
        };
        let rank = number(lookup, launcher.rank)?.ok_or(EnvError::Nothing)?;
        // Kubernetes does not tell a pod how many there are; the manifest has to.
        let size_names = [launcher.size, "WORLD_SIZE"];
        let mut size = None;
        for name in size_names {
            size = size.or(number(lookup, name)?.map(|size| (name, size)));
        }
        let (size_name, size) = size.ok_or(EnvError::Missing(size_names[0], launcher.rank))?;
        if size > MOST_RANKS {
            let what = "a world of at most 65536 ranks";
            return Err(EnvError::Value { name: size_name, value: size.to_string(), what });
        }
        let world = WorldSize::new(size)
            .filter(|world| rank < world.get())
            .ok_or(EnvError::OutOfRange { rank_name: launcher.rank, rank, size_name, size })?;
        let local_size = number(lookup, "OMPI_COMM_WORLD_LOCAL_SIZE")?;
        let master_host = master_host(lookup)?
            .or_else(|| lookup("SLURM_LAUNCH_NODE_IPADDR").filter(|_| launcher.source == "Slurm"))
            .or_else(|| (local_size == Some(size) || size == 1).then(|| "127.0.0.1".to_owned()))
            .ok_or(EnvError::Missing("MASTER_ADDR", launcher.rank))?;
        let job = launcher.job(lookup, rank);
        let master_port = match number(lookup, "MASTER_PORT")? {
            Some(port) => {
                u16::try_from(port).ok().filter(|port| *port > 0).ok_or(EnvError::Value {
                    name: "MASTER_PORT",
                    value: port.to_string(),
                    what: "a port from 1 to 65535",
                })?
            }
            None => job
                .as_deref()
                .map(port_of_job)
                .or((size == 1).then_some(0))
                .ok_or(EnvError::Missing("MASTER_PORT", launcher.rank))?,
        };
        Ok(Self { rank: Peer(rank), world, master_host, master_port, job, source: launcher.source })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, world, master_host, master_port, source, .. } = self;
        write!(f, "{rank} of {world} (as {source} says), rank 0 at {master_host}:{master_port}")
    }
}

/// Rank 0's host, from MASTER_ADDR. An IPv6 address may be in brackets.
fn master_host(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<String>, EnvError> {
    let Some(value) = lookup("MASTER_ADDR") else { return Ok(None) };
    let host = value.trim();
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    // With one colon, it is an address and a port. An IPv6 address has more.
    if host.matches(':').count() == 1 {
        let what = "an address without a port, which goes into MASTER_PORT";
        return Err(EnvError::Value { name: "MASTER_ADDR", value, what });
    }
    let is_anywhere = host.parse().is_ok_and(|address: IpAddr| address.is_unspecified());
    if host.is_empty() || is_anywhere {
        let what = "the address of rank 0, by which all ranks can reach it";
        return Err(EnvError::Value { name: "MASTER_ADDR", value, what });
    }
    Ok(Some(host.to_owned()))
}

/// A variable that must be a whole number if it is set.
fn number(
    lookup: &dyn Fn(&str) -> Option<String>,
    name: &'static str,
) -> Result<Option<u32>, EnvError> {
    lookup(name)
        .map(|value| {
            let what = match name {
                "MASTER_PORT" => "a port from 1 to 65535",
                _ => "a whole number from 0 to 4294967295",
            };
            value.trim().parse().map_err(|_| EnvError::Value { name, value, what })
        })
        .transpose()
}

/// A time as people write it: 90, 90s, 500ms, 10m, 2h; more than zero, and at most a year.
pub(crate) fn time(name: &'static str, value: &str) -> Result<Duration, EnvError> {
    let wrong = || EnvError::Value {
        name,
        value: value.to_owned(),
        what: "a time from 1ms to 8760h, like 90s, 500ms, 10m or 2h (a bare number counts seconds)",
    };
    let text = value.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let milliseconds = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wrong()),
    };
    let time = number.checked_mul(milliseconds).map(Duration::from_millis).ok_or_else(wrong)?;
    if time.is_zero() || time > MAX_TIME { Err(wrong()) } else { Ok(time) }
}

/// The longest time: no clock overflows when it is added.
pub(crate) const MAX_TIME: Duration = Duration::from_secs(8760 * 3600);

/// A port that all processes of a job derive from its name: from 20000 to 51999.
fn port_of_job(job: &str) -> u16 {
    let hash = job
        .bytes()
        .fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    20_000 + (hash % 32_000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Result<Place, EnvError> {
        Place::from_lookup(&|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn every_launcher_is_understood() {
        let master = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];
        for (rank, size) in [
            ("RANK", "WORLD_SIZE"),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("SLURM_PROCID", "SLURM_NTASKS"),
            ("PMI_RANK", "PMI_SIZE"),
            ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
            ("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
        ] {
            let place = place(&[&[(rank, "3"), (size, "8")], &master[..]].concat()).unwrap();
            assert_eq!((place.rank, place.world.get()), (Peer(3), 8), "{rank}");
            assert_eq!((&place.master_host[..], place.master_port), ("10.0.0.1", 29500));
        }
    }

    #[test]
    fn one_machine_under_mpirun_needs_nothing_more() {
        let place = place(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("PMIX_NAMESPACE", "1234@5"),
        ])
        .unwrap();
        assert_eq!(place.master_host, "127.0.0.1");
        assert!(place.master_port >= 20_000);
    }

    #[test]
    fn all_ranks_of_a_job_find_the_same_name_and_port() {
        let master = [("MASTER_ADDR", "a")];
        let job = |variables: &[(&str, &str)]| {
            place(&[variables, &master[..]].concat()).map(|place| (place.job, place.master_port))
        };
        // A pod is named after its index, and PMI_ID is a process's own number: neither is a job's
        // name.
        let pod = |rank, host| {
            job(&[("JOB_COMPLETION_INDEX", rank), ("JOB_COMPLETIONS", "4"), ("HOSTNAME", host)])
        };
        assert_eq!(pod("0", "train-0"), pod("3", "train-3"));
        assert_eq!(pod("0", "train-0").unwrap().0.as_deref(), Some("train"));
        assert!(pod("0", "elsewhere").is_err());
        let pmi = |rank| job(&[("PMI_RANK", rank), ("PMI_SIZE", "4"), ("PMI_ID", rank)]);
        assert_eq!(pmi("1"), Err(EnvError::Missing("MASTER_PORT", "PMI_RANK")));
        // Two steps of one Slurm job are two jobs.
        let step = |step| {
            let variables = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_ID", "7")];
            job(&[&variables[..], &[("SLURM_STEP_ID", step)]].concat()).unwrap()
        };
        assert_eq!(step("0").0.as_deref(), Some("7.0"));
        assert_ne!(step("0"), step("1"));
        // Without a name from its user, torchrun calls every job the same.
        let torch = |name| {
            let variables = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1")];
            job(&[&variables[..], &[("TORCHELASTIC_RUN_ID", name)]].concat()).unwrap().0
        };
        assert_eq!((torch("none"), torch("run").as_deref()), (None, Some("run")));
    }

    #[test]
    fn times_are_as_people_write_them_or_errors() {
        for (text, milliseconds) in [
            ("90", 90_000),
            (" 90s ", 90_000),
            ("1ms", 1),
            ("10m", 600_000),
            ("10min", 600_000),
            ("2h", 7_200_000),
        ] {
            assert_eq!(time("T", text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        let huge = "9".repeat(10_000);
        for text in [
            "",
            "0",
            "0s",
            "-1",
            "1.5s",
            "s",
            "10 s",
            "10d",
            "8761h",
            "١",
            "18446744073709551615h",
            &huge,
        ] {
            let error = time("T", text).unwrap_err().to_string();
            assert!(error.starts_with("T=") && error.len() < 300, "{text}: {error}");
        }
    }

    #[test]
    fn what_does_not_parse_is_an_error_never_a_default() {
        let base = [("WORLD_SIZE", "4"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        let with = |name, value| {
            let rest = base.into_iter().filter(|(key, _)| *key != name);
            place(
                &[("RANK", "0")]
                    .into_iter()
                    .filter(|(key, _)| *key != name)
                    .chain(rest)
                    .chain([(name, value)])
                    .collect::<Vec<_>>(),
            )
        };
        for (name, value) in [
            ("RANK", "one"),
            ("RANK", "-1"),
            ("RANK", "4"),
            ("RANK", ""),
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", "x"),
            ("WORLD_SIZE", "4294967295"),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "70000"),
            ("MASTER_PORT", "http"),
        ] {
            let error = with(name, value).unwrap_err().to_string();
            assert!(error.contains(name), "{name}={value}: {error}");
        }
        assert!(with("MASTER_ADDR", "b").is_ok());
        assert_eq!(with("MASTER_ADDR", " [::1]").unwrap().master_host, "::1");
        let port = with("MASTER_ADDR", "127.0.0.1:5000").unwrap_err().to_string();
        assert!(port.contains("goes into MASTER_PORT"), "{port}");
        for nowhere in ["", " ", "0.0.0.0", "::", "[::]", "[]"] {
            let error = with("MASTER_ADDR", nowhere).unwrap_err().to_string();
            assert!(error.contains("by which all ranks can reach it"), "{nowhere}: {error}");
        }
        assert_eq!(place(&[]), Err(EnvError::Nothing));
        assert_eq!(place(&[("WORLD_SIZE", "4")]), Err(EnvError::Missing("RANK", "WORLD_SIZE")));
        assert_eq!(
            place(&[("RANK", "0"), ("WORLD_SIZE", "2")]),
            Err(EnvError::Missing("MASTER_ADDR", "RANK"))
        );
    }
}
