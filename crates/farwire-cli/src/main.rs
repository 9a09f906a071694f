//! The `farwire` program.

#![forbid(unsafe_code)]

mod sim;
mod units;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Training models across the networks people actually have.
#[derive(Debug, Parser)]
#[command(name = "farwire", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Sim(sim::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Sim(args) => sim::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("farwire: {error}");
            ExitCode::FAILURE
        }
    }
}
