//! The `farwire` program.

#![forbid(unsafe_code)]

mod bench;
mod device;
mod doctor;
mod hosts;
mod launch;
mod links;
mod named;
mod netlab;
mod sim;
mod train;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use farwire_netlab::units;

/// Training models across the networks people actually have.
#[derive(Debug, Parser)]
#[command(name = "farwire", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Bench(bench::Args),
    Doctor(doctor::Args),
    Launch(launch::Args),
    #[command(hide = true)]
    BecomeRank(launch::BecomeArgs),
    Netlab(Box<netlab::Args>),
    Sim(sim::Args),
    Train(Box<train::Args>),
    /// Print a new cluster token, for FARWIRE_TOKEN: the one secret that all machines of a cluster
    /// share.
    Token,
}

fn main() -> ExitCode {
    let log = tracing_subscriber::EnvFilter::try_from_env("FARWIRE_LOG");
    tracing_subscriber::fmt()
        .with_env_filter(log.unwrap_or_else(|_| "warn".into()))
        .with_writer(std::io::stderr)
        .without_time()
        // Do not panic when nobody reads the log any more.
        .log_internal_errors(false)
        .init();
    let result: Result<ExitCode, Box<dyn Error>> = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args).map_err(Into::into),
        Command::Doctor(args) => doctor::run(&args).map_err(Into::into),
        Command::Launch(args) => launch::run(&args).map_err(Into::into),
        Command::BecomeRank(args) => launch::become_rank(&args).map_err(Into::into),
        Command::Netlab(args) => netlab::run(&args).map_err(Into::into),
        Command::Sim(args) => sim::run(&args).map(|()| ExitCode::SUCCESS).map_err(Into::into),
        Command::Train(args) => train::run(&args).map_err(Into::into),
        Command::Token => {
            println!("{}", farwire::Token::generate().reveal());
            Ok(ExitCode::SUCCESS)
        }
    };
    result.unwrap_or_else(|error| {
        launch::say_error(&*error);
        ExitCode::FAILURE
    })
}
