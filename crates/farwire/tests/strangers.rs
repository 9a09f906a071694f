//! Tier 3: a process that is not of the cluster, or not who it says it is, is refused, and a
//! running job does not notice.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::io::Read;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use common::relay::{Relay, Way};
use common::stranger::{garbage, garbage_tcp, half_open, half_open_tcp, knock, knock_tcp};
use common::{assert_succeeds, free_port, resident_megabytes, start_processes_at};
use farwire::{Builder, Communicator, Peer, Place, ReduceOp, Token};
use farwire_proto::WorldSize;

fn place(rank: u32, world: u32, port: u16) -> Place {
    Place {
        rank: Peer(rank),
        world: WorldSize::new(world).unwrap(),
        master_host: "127.0.0.1".to_owned(),
        master_port: port,
        job: None,
        source: "the test",
    }
}

fn network() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn join(
    rank: u32,
    world: u32,
    port: u16,
    token: &Token,
    seconds: u64,
) -> Result<Communicator, farwire::Error> {
    builder(rank, world, port, token, seconds).join()
}

fn builder(rank: u32, world: u32, port: u16, token: &Token, seconds: u64) -> Builder {
    Communicator::builder()
        .place(place(rank, world, port))
        .token(token.clone())
        .join_timeout(Duration::from_secs(seconds))
}

/// What a process is told when it is refused.
fn refusal(builder: Builder) -> String {
    builder.join().map(|_| "it was let in").unwrap_err().to_string()
}

/// Checks that all ranks are there, and of one job.
fn sum_to(expected: u32, comms: Vec<Communicator>) {
    std::thread::scope(|scope| {
        let sums: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                scope.spawn(move || comm.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap())
            })
            .collect();
        for sum in sums {
            assert_eq!(sum.join().unwrap(), [expected]);
        }
    });
}

/// The number of half-open handshakes: more than a process keeps at once, all from one address,
/// which the ranks have, too.
const SLOW: usize = 300;

#[test]
fn slow_handshakes_do_not_keep_ranks_from_joining() {
    let (token, port) = (Token::generate(), free_port());
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| join(0, 2, port, &token, 60).unwrap());
        let strangers = network().block_on(half_open(([127, 0, 0, 1], port).into(), SLOW));
        // In less time than it takes to give the strangers up.
        let one = join(1, 2, port, &token, 8).unwrap();
        let zero = zero.join().unwrap();
        let sums = [zero, one]
            .map(|comm| scope.spawn(move || comm.all_reduce(vec![1], ReduceOp::Sum).wait()));
        for sum in sums {
            assert_eq!(sum.join().unwrap().unwrap(), [2]);
        }
        drop(strangers);
    });
}

#[test]
fn silent_connections_do_not_keep_ranks_from_having_a_tcp_link() {
    let (token, port) = (Token::generate(), free_port());
    let join = |rank| builder(rank, 2, port, &token, 60).link("tcp".parse().unwrap()).join();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| join(0).unwrap());
        let server = std::net::SocketAddr::from(([127, 0, 0, 1], port));
        while std::net::TcpStream::connect(server).is_err() {
            std::thread::yield_now();
        }
        let silent = half_open_tcp(server, SLOW);
        let one = join(1).unwrap();
        sum_to(2, vec![zero.join().unwrap(), one]);
        drop(silent);
    });
}

/// Makes all-reduces until the test says that it is enough, and checks each sum and the growth of
/// this process.
fn reduce_until_told(comm: &Communicator) {
    let enough = Arc::new(AtomicBool::new(false));
    let told = enough.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        told.store(true, SeqCst);
    });
    let mut before = 0;
    for round in 0u32.. {
        // All ranks must leave in the same round.
        let leave = u32::from(comm.rank() == 0 && enough.load(SeqCst));
        let mut mine = vec![round; 10_000];
        mine[0] = leave;
        let sum = comm.all_reduce(mine, ReduceOp::Sum).wait().unwrap();
        assert!(sum[1..].iter().all(|sum| *sum == 2 * round), "round {round}");
        if round == 100 {
            before = resident_megabytes();
            println!("ready");
        }
        if sum[0] > 0 {
            let after = resident_megabytes();
            println!("rounds: {round}; megabytes before strangers: {before}, after: {after}");
            assert!(round > 100 && after < before + 64);
            return;
        }
    }
}

/// Joins without a token in the environment, and with a key file of its own, as another user of the
/// same machine has.
fn join_without_token(test: &str, port: u16) -> String {
    const MARK: &str = "FARWIRE_TEST_STRANGER";
    if std::env::var_os(MARK).is_some() {
        let port = std::env::var(MARK).unwrap().parse().unwrap();
        let stranger =
            Communicator::builder().place(place(1, 2, port)).join_timeout(Duration::from_secs(3));
        println!("{}", stranger.join().unwrap_err());
        std::process::exit(0);
    }
    let home = std::env::temp_dir().join(format!("farwire-stranger-{}", std::process::id()));
    let stranger = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(MARK, port.to_string())
        .env("XDG_CONFIG_HOME", &home)
        .env_remove("FARWIRE_TOKEN")
        .output();
    let _ = std::fs::remove_dir_all(home);
    String::from_utf8(stranger.unwrap().stdout).unwrap()
}

#[test]
fn a_running_job_does_not_notice_strangers() {
    strangers_come("a_running_job_does_not_notice_strangers", "quic");
}

#[test]
fn a_running_job_over_tcp_does_not_notice_strangers() {
    strangers_come("a_running_job_over_tcp_does_not_notice_strangers", "tcp");
}

fn strangers_come(test: &str, link: &str) {
    let (token, port) = (Token::generate(), free_port());
    if std::env::var_os("FARWIRE_TEST_STRANGER").is_some() {
        join_without_token(test, port);
    }
    // An elastic job listens on TCP for as long as it runs; others until all have joined.
    let elastic = [("FARWIRE_ELASTIC", if link == "tcp" { "1" } else { "0" })];
    let mut ranks = start_processes_at(test, &[port; 2], &token, link, &elastic, |comm| {
        reduce_until_told(&comm)
    });
    if ranks.is_empty() {
        return; // this is one of them
    }
    for rank in &mut ranks {
        // Byte by byte, so that what comes later is left for later reads.
        let (mut said, mut byte) = (Vec::new(), [0]);
        while !said.ends_with(b"ready\n") {
            let read = rank.stdout.as_mut().unwrap().read_exact(&mut byte);
            assert!(read.is_ok(), "a rank has ended: {}", String::from_utf8_lossy(&said));
            said.extend(byte);
        }
    }
    let server = ([127, 0, 0, 1], port).into();

    let error = join_without_token(test, port);
    assert!(error.contains("could not reach rank 0") && error.contains("same token"), "{error}");

    let error = join(1, 2, port, &Token::generate(), 4).unwrap_err().to_string();
    assert!(error.contains("could not reach rank 0") && error.contains("same token"), "{error}");

    // The right token and a rank that is taken.
    let error = join(1, 2, port, &token, 10).unwrap_err().to_string();
    assert!(error.contains("the group is complete"), "{error}");

    let network = network();
    let error = network.block_on(knock(server, false));
    assert!(error.contains("aborted by peer") && error.contains("certificate"), "{error}");
    let error = network.block_on(knock(server, true));
    assert!(error.contains("aborted by peer") && error.contains("certificate"), "{error}");

    garbage(server, 100_000);

    let mut silent = Vec::new();
    if link == "quic" {
        let refused = std::net::TcpStream::connect(server).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "nobody else is to come");
    }
    if link == "tcp" {
        for own_certificate in [false, true] {
            let told = knock_tcp(server, own_certificate);
            assert!(told.contains("Certificate") || told.contains("UnknownCA"), "{told}");
        }
        garbage_tcp(server, 100);
        silent = half_open_tcp(server, SLOW);
    }
    let strangers = network.block_on(half_open(server, SLOW));
    // They hold nobody up, either.
    let error = join(1, 2, port, &token, 10).unwrap_err().to_string();
    assert!(error.contains("the group is complete"), "{error}");
    drop((strangers, silent));

    for (index, rank) in ranks.into_iter().enumerate() {
        let said = assert_succeeds(rank, &format!("rank {index}"));
        println!("rank {index}: {}", said.lines().find(|line| line.contains("megabytes")).unwrap());
    }
}

/// Strays of another job, of a job of another size, and with a taken rank: each is told why it is
/// refused, and the job that they came to goes on waiting for its own ranks.
#[test]
fn a_stray_of_another_job_does_not_end_a_healthy_one() {
    let (token, port) = (Token::generate(), free_port());
    let of = |job: &str, rank, world| builder(rank, world, port, &token, 60).job(job);
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| of("healthy", 0, 3).join().unwrap());
        for (job, rank, world, says) in [
            ("stray", 1, 8, "belongs to job \"stray\", rank 0 to job \"healthy\""),
            ("stray", 2, 3, "belongs to job \"stray\", rank 0 to job \"healthy\""),
            ("healthy", 1, 8, "started for 8 ranks, rank 0 for 3"),
            ("healthy", 7, 8, "started for 8 ranks, rank 0 for 3"),
        ] {
            let error = refusal(of(job, rank, world));
            assert!(error.contains("refused rank") && error.contains(says), "{error}");
            assert!(error.contains("FARWIRE_JOB"), "{error}");
        }
        let error = refusal(builder(1, 3, port, &token, 60));
        assert!(error.contains("belongs to a job without a name"), "{error}");
        let rest = [1, 2].map(|rank| scope.spawn(move || of("healthy", rank, 3).join().unwrap()));
        let mut comms = vec![zero.join().unwrap()];
        comms.extend(rest.map(|rank| rank.join().unwrap()));
        // Nor do strays end it when it is complete.
        let error = refusal(of("stray", 1, 3));
        assert!(error.contains("belongs to job \"stray\""), "{error}");
        let error = refusal(of("healthy", 1, 3));
        assert!(error.contains("the group is complete"), "{error}");
        sum_to(3, comms);
    });
}

#[test]
fn strays_in_a_loop_do_not_keep_a_job_from_starting() {
    let (token, port) = (Token::generate(), free_port());
    let (token, enough) = (&token, &AtomicBool::new(false));
    std::thread::scope(|scope| {
        let strays: [_; 8] = std::array::from_fn(|stray| {
            scope.spawn(move || {
                while !enough.load(SeqCst) {
                    let rank = 1 + stray as u32 % 2;
                    let error = refusal(builder(rank, 3, port, token, 60).job("stray"));
                    assert!(error.contains("belongs to job \"stray\""), "{error}");
                }
            })
        });
        let ranks = [0, 1, 2].map(|rank| {
            scope.spawn(move || builder(rank, 3, port, token, 60).job("healthy").join())
        });
        let comms = ranks.map(|rank| rank.join().unwrap());
        enough.store(true, SeqCst);
        // Rank 0 stays until the last stray was told.
        for stray in strays {
            stray.join().unwrap();
        }
        sum_to(3, comms.into_iter().map(Result::unwrap).collect());
    });
}

/// Two jobs of one cluster are sent to one port: the first gets it, and all ranks of the other are
/// told.
#[test]
fn of_two_jobs_at_one_port_one_runs_and_the_other_is_told() {
    for order in 0..24 {
        let (token, port) = (Token::generate(), free_port());
        let mut ranks = vec![("a", 0), ("a", 1), ("b", 0), ("b", 1)];
        let mut started = Vec::new();
        for choice in [order / 6, order / 2 % 3, order % 2, 0] {
            started.push(ranks.remove(choice));
        }
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = started
                .into_iter()
                .map(|(job, rank)| {
                    let builder = builder(rank, 2, port, &token, 60).job(job);
                    scope.spawn(move || (job, rank, builder.join()))
                })
                .collect();
            // Those that got in stay until all others were told.
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let winner = results.iter().find(|(.., result)| result.is_ok()).unwrap().0;
        let mut comms = Vec::new();
        for (job, rank, result) in results {
            match result {
                Ok(comm) if job == winner => comms.push(comm),
                Ok(_) => panic!("two jobs at one port"),
                Err(error) if job == winner => panic!("{error}"),
                Err(error) => {
                    let says = ["could not listen", "belongs to job"][rank as usize];
                    assert!(error.to_string().contains(says), "order {order}: {error}");
                }
            }
        }
        sum_to(2, comms);
    }
}

#[test]
fn ranks_that_disagree_on_the_world_are_both_told() {
    let (token, port) = (Token::generate(), free_port());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(1, 3, port, &token, 60).unwrap_err().to_string());
        let here = scope.spawn(|| join(0, 2, port, &token, 3).unwrap_err().to_string());
        for error in [here.join().unwrap(), other.join().unwrap()] {
            assert!(error.contains("for 3 ranks") && error.contains("for 2"), "{error}");
        }
    });
}

#[test]
fn a_rank_that_is_taken_is_refused_and_the_job_goes_on() {
    let (token, port) = (Token::generate(), free_port());
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| join(0, 3, port, &token, 60).unwrap());
        let (tell, told) = std::sync::mpsc::channel();
        for _ in 0..2 {
            let (token, tell) = (&token, tell.clone());
            scope.spawn(move || tell.send(join(1, 3, port, token, 60)));
        }
        // One of the two waits for rank 2, which comes once the other was refused.
        let error = told.recv().unwrap().unwrap_err().to_string();
        assert!(error.contains("there already is a rank 1"), "{error}");
        let two = join(2, 3, port, &token, 60).unwrap();
        sum_to(3, vec![zero.join().unwrap(), told.recv().unwrap().unwrap(), two]);
    });
}

/// A killed rank cannot say goodbye, so rank 0 still believes it to be there when its successor
/// comes.
#[test]
fn a_rank_that_is_killed_while_it_joins_can_be_started_again() {
    const TEST: &str = "a_rank_that_is_killed_while_it_joins_can_be_started_again";
    const MARK: &str = "FARWIRE_TEST_KILLED";
    if let Ok(given) = std::env::var(MARK) {
        let (port, token) = given.split_once(' ').unwrap();
        let _ = join(1, 3, port.parse().unwrap(), &token.parse().unwrap(), 60);
        return;
    }
    let (token, port) = (Token::generate(), free_port());
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| join(0, 3, port, &token, 60).unwrap());
        // What follows the handshake has a short header. By the third such packet that the rank
        // gets, rank 0 has answered its hello.
        let (answer, heard) = std::sync::mpsc::channel();
        let relay = Relay::start(([127, 0, 0, 1], port).into(), move |way, datagram| {
            if way == Way::ToClient && datagram.first().is_some_and(|byte| byte & 0x80 == 0) {
                let _ = answer.send(());
            }
            true
        });
        let mut killed = Command::new(std::env::current_exe().unwrap())
            .args([TEST, "--exact"])
            .env(MARK, format!("{} {}", relay.address.port(), token.reveal()))
            .spawn()
            .unwrap();
        for _ in 0..3 {
            heard.recv_timeout(Duration::from_secs(60)).expect("rank 0 answers");
        }
        killed.kill().unwrap();
        killed.wait().unwrap();
        let one = scope.spawn(|| join(1, 3, port, &token, 60).unwrap());
        let two = join(2, 3, port, &token, 60).unwrap();
        sum_to(3, vec![zero.join().unwrap(), one.join().unwrap(), two]);
    });
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let (token, port) = (Token::generate(), free_port());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(2, 3, port, &token, 30).unwrap_err().to_string());
        let here = join(0, 3, port, &token, 3).unwrap_err().to_string();
        assert!(here.contains("rank 1 did not come"), "{here}");
        assert!(other.join().unwrap().contains("rank 1 did not come"), "the others are told, too");
    });
}

#[test]
fn a_rank_with_another_token_is_named_by_those_who_wait_for_it() {
    let (token, port) = (Token::generate(), free_port());
    std::thread::scope(|scope| {
        let one = scope.spawn(|| join(1, 2, port, &Token::generate(), 3).unwrap_err().to_string());
        let zero = join(0, 2, port, &token, 3).unwrap_err().to_string();
        assert!(zero.contains("a process at 127.0.0.1:"), "{zero}");
        assert!(zero.contains("another token"), "{zero}");
        assert!(one.join().unwrap().contains("same token"));
    });
}

#[test]
fn ranks_without_a_link_in_common_both_say_so() {
    let (token, port) = (Token::generate(), free_port());
    std::thread::scope(|scope| {
        let join = |rank, link: &'static str| {
            let builder = builder(rank, 2, port, &token, 60).link(link.parse().unwrap());
            scope.spawn(move || refusal(builder))
        };
        for rank in [join(0, "shm"), join(1, "quic")] {
            let error = rank.join().unwrap();
            assert!(error.contains("[shm]") && error.contains("[quic]"), "{error}");
            assert!(error.contains("FARWIRE_LINK"), "{error}");
        }
    });
}

#[test]
fn any_address_but_loopback_needs_a_token() {
    let place = Place { master_host: "192.0.2.1".to_owned(), ..place(1, 2, 29500) };
    let error = Communicator::builder().place(place).join().unwrap_err().to_string();
    assert!(error.contains("export FARWIRE_TOKEN=$(farwire token)"), "{error}");
}
