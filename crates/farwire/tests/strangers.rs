//! Tier 3: whoever is not of the cluster, or not who it says, is refused, and a running job does not notice.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::net::UdpSocket;
use std::time::Duration;

use farwire::{Communicator, Peer, Place, ReduceOp, Token};
use farwire_proto::WorldSize;

fn place(rank: u32, world: u32, port: u16) -> Place {
    Place {
        rank: Peer(rank),
        world: WorldSize::new(world).unwrap(),
        master_host: "127.0.0.1".to_owned(),
        master_port: port,
        source: "the test",
    }
}

fn free_port() -> u16 {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn join(
    rank: u32,
    world: u32,
    port: u16,
    token: &Token,
    seconds: u64,
) -> Result<Communicator, farwire::Error> {
    Communicator::builder()
        .place(place(rank, world, port))
        .token(token.clone())
        .patience(Duration::from_secs(seconds))
        .join()
}

/// Two ranks of a job, as threads with a network between them.
fn pair(port: u16, token: &Token) -> [Communicator; 2] {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(1, 2, port, token, 60).unwrap());
        [join(0, 2, port, token, 60).unwrap(), other.join().unwrap()]
    })
}

#[test]
fn a_running_job_does_not_notice_strangers() {
    let (token, port) = (Token::generate(), free_port());
    let [zero, one] = pair(port, &token);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let job = |comm: Communicator| {
            let done = &done;
            move || {
                let mut rounds = 0u32;
                loop {
                    // All ranks must leave in the same round.
                    let leave = u32::from(comm.rank() == 0 && done.load(std::sync::atomic::Ordering::SeqCst));
                    let sum = comm.all_reduce(vec![rounds, leave], ReduceOp::Sum).wait().unwrap();
                    assert_eq!(sum[0], 2 * rounds);
                    if sum[1] > 0 {
                        return rounds;
                    }
                    rounds += 1;
                }
            }
        };
        let jobs = [scope.spawn(job(zero)), scope.spawn(job(one))];

        // Another token: no certificate of this cluster.
        let error = join(1, 2, port, &Token::generate(), 4).unwrap_err().to_string();
        assert!(error.contains("could not reach rank 0") && error.contains("same token"), "{error}");
        // The right token and a rank that is taken.
        let error = join(1, 2, port, &token, 10).unwrap_err().to_string();
        assert!(error.contains("the group is complete"), "{error}");
        // Garbage.
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut noise = 1u64;
        for length in (0..20_000).map(|i| i % 1400) {
            let garbage: Vec<u8> = (0..length)
                .map(|_| {
                    noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (noise >> 56) as u8
                })
                .collect();
            let _ = socket.send_to(&garbage, ("127.0.0.1", port));
        }
        done.store(true, std::sync::atomic::Ordering::SeqCst);
        let [a, b] = jobs.map(|job| job.join().unwrap());
        assert_eq!(a, b);
        assert!(a > 0);
    });
}

#[test]
fn ranks_that_disagree_on_the_world_are_both_told() {
    let (token, port) = (Token::generate(), free_port());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(1, 3, port, &token, 30).unwrap_err().to_string());
        let here = join(0, 2, port, &token, 30).unwrap_err().to_string();
        for error in [here, other.join().unwrap()] {
            assert!(error.contains("for 3 ranks") && error.contains("for 2"), "{error}");
        }
    });
}

#[test]
fn a_rank_that_comes_twice_is_an_error_for_all() {
    let (token, port) = (Token::generate(), free_port());
    std::thread::scope(|scope| {
        let twins = [1, 1].map(|rank| {
            let token = &token;
            scope.spawn(move || join(rank, 3, port, token, 30).unwrap_err().to_string())
        });
        let here = join(0, 3, port, &token, 30).unwrap_err().to_string();
        assert!(here.contains("rank 1 has come twice"), "{here}");
        for twin in twins {
            let error = twin.join().unwrap();
            assert!(error.contains("rank 1 has come twice"), "{error}");
        }
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
fn any_address_but_loopback_needs_a_token() {
    let place = Place { master_host: "192.0.2.1".to_owned(), ..place(1, 2, 29500) };
    let error = Communicator::builder().place(place).join().unwrap_err().to_string();
    assert!(error.contains("export FARWIRE_TOKEN=$(farwire token)"), "{error}");
}
