//! `farwire doctor`: what is wrong, or was.

#[cfg(feature = "cuda")]
mod cards;
mod flights;
mod pairs;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use farwire::{Communicator, EnvError, Error, JoinError, LinkChoice, Place, ReduceOp};

use pairs::Survey;

/// Examine this machine, the links between ranks, or a job that failed.
///
/// Alone, it examines this machine: interfaces, UDP buffers, batching, shared memory, and, if built
/// with the feature `cuda`, GPUs.
///
/// Run as a job (`farwire launch -n 4 -- farwire doctor`, or under any launcher), it also measures
/// round trip, bandwidth and loss between all pairs of ranks, in each direction, and estimates what
/// they mean for an all-reduce of 100 MB with each codec. Between hosts it does so over TCP and
/// over QUIC, unless FARWIRE_LINK names one.
///
/// Given the flight records that the ranks of a failed job left, it says which rank was missing.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farwire doctor
  farwire launch -n 4 -- farwire doctor
  farwire launch -n 2 -- sh -c 'FARWIRE_HOST=host$RANK exec farwire doctor'   (as if on two hosts)
  farwire netlab --rate 100mbit --delay 20ms -- farwire doctor
  farwire doctor DIR/*.json                     (launch prints DIR when a job fails)
  farwire doctor --merge all.json trace.rank*.json   (then open all.json at ui.perfetto.dev)")]
pub(crate) struct Args {
    /// Flight records of a failed job, one per rank; with --merge, traces.
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Merge the traces of several ranks (FARWIRE_TRACE) into this one file.
    #[arg(long, value_name = "OUT", requires = "files")]
    merge: Option<PathBuf>,
}

/// Why there is nothing to say.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DoctorError {
    #[error("could not read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is not {what}: {source}", path.display())]
    NotWhat { path: PathBuf, what: &'static str, source: serde_json::Error },
    #[error("could not write {}: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error(
        "{} and {} are both of rank {rank}; give the records of one job, each once",
        one.display(), other.display()
    )]
    Twice { one: PathBuf, other: PathBuf, rank: u32 },
    #[error(
        "{} is of a job of {theirs} ranks, {} of one of {ours}; give the records of one job",
        other.display(), one.display()
    )]
    Worlds { one: PathBuf, ours: u32, other: PathBuf, theirs: u32 },
    #[error(transparent)]
    Run(#[from] farwire::Error),
    #[error("could not write: {0}")]
    Output(#[from] std::io::Error),
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode, DoctorError> {
    let mut out = std::io::stdout().lock();
    if let Some(merged) = &args.merge {
        let events = flights::merge(&args.files, merged)?;
        writeln!(out, "{} events of {} files in {}", events, args.files.len(), merged.display())?;
    } else if !args.files.is_empty() {
        write!(out, "{}", flights::diagnose(&args.files)?)?;
    } else {
        match Place::from_env() {
            Err(EnvError::Nothing) => examine(&mut out)?,
            Err(error) => return Err(DoctorError::Run(error.into())),
            Ok(place) => {
                if place.rank.0 == 0 {
                    examine(&mut out)?;
                }
                look_around(place.rank.0 == 0, &mut out)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Measures the links to the other ranks. If hosts were free to take another link, measures that
/// one too.
fn look_around(shows: bool, out: &mut impl Write) -> Result<(), DoctorError> {
    let comm = Communicator::from_env()?;
    let taken = Survey::of(&comm, None)?;
    if shows {
        write!(out, "\n{}", taken.show())?;
        out.flush()?;
    }
    let is_free =
        std::env::var_os("FARWIRE_LINK").is_none_or(|link| link == LinkChoice::AUTO.name());
    let all_free = comm.all_reduce(vec![u8::from(is_free)], ReduceOp::Min).wait()?[0] == 1;
    comm.shutdown()?;
    if !all_free || !taken.has_network() {
        return Ok(());
    }
    let Some(other) = taken.other_link() else {
        if shows {
            writeln!(
                out,
                "\nSome pairs took TCP, others QUIC; FARWIRE_LINK=tcp or =quic measures one of them."
            )?;
        }
        return Ok(());
    };
    if shows {
        eprintln!("joining once more, over {other}");
    }
    let measured = pairs::join_again(other).and_then(|comm| {
        let survey = Survey::of(&comm, Some(&taken))?;
        comm.shutdown()?;
        Ok(survey)
    });
    if shows {
        match measured {
            Ok(survey) => write!(out, "\n{}", survey.show_beside(other, &taken))?,
            Err(Error::Join { source: JoinError::Link(_), .. }) => {
                writeln!(out, "\nOver {other}, some ranks cannot reach each other.")?;
            }
            Err(error) => writeln!(out, "\nCould not measure how fast {other} would be: {error}")?,
        }
    }
    Ok(())
}

fn examine(out: &mut impl Write) -> std::io::Result<()> {
    for farwire::doctor::Finding { what, state, found, advice } in farwire::doctor::examine() {
        writeln!(out, "{state:<7} {what}: {found}")?;
        if let Some(advice) = advice {
            writeln!(out, "        {advice}")?;
        }
    }
    #[cfg(feature = "cuda")]
    cards::examine(out)?;
    Ok(())
}
