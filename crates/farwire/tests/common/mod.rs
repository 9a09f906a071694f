//! Every collective through the public API, checked by each rank against the simulator's oracle.

#![allow(dead_code, reason = "each test file uses its own share of this")]

pub(crate) mod relay;
pub(crate) mod stranger;

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use farwire::{Algorithm, Communicator, Element, Options, ReduceOp, Token};
use farwire_proto::{Call, Counts, Kind, Rank};
use farwire_sim::oracle;
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Elements that every rank can make for every rank.
pub(crate) trait Sample: Element {
    fn sample(rng: &mut ChaCha8Rng) -> Self;
}

macro_rules! samples {
    ($($type:ty => $rng:ident $value:expr),* $(,)?) => {$(
        impl Sample for $type {
            fn sample($rng: &mut ChaCha8Rng) -> Self { $value }
        }
    )*};
}

samples! {
    f32 => rng rng.random_range(-4.0..4.0) * 2f32.powi(rng.random_range(-12..12)),
    f64 => rng rng.random_range(-4.0..4.0),
    bf16 => rng bf16::from_f32(f32::sample(rng)),
    f16 => rng f16::from_f32(rng.random_range(-4.0..4.0)),
    i8 => rng rng.random(),
    i32 => rng rng.random(),
    i64 => rng rng.random(),
    u8 => rng rng.random(),
    u32 => rng rng.random(),
    u64 => rng rng.random(),
}

pub(crate) fn samples<T: Sample>(seed: u64, rank: usize, count: usize) -> Vec<T> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ (rank as u64) << 32);
    (0..count).map(|_| T::sample(&mut rng)).collect()
}

fn bytes<T: Element>(elements: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(elements).to_vec()
}

/// Runs every collective with every algorithm on vectors of `len` elements, and panics on the first wrong bit.
pub(crate) fn every_collective<T: Sample>(comm: &Communicator, len: usize, op: ReduceOp) {
    let (me, n) = (comm.rank(), comm.size());
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Message) {
        for algorithm in kind.algorithms() {
            one_collective::<T>(comm, kind, *algorithm, len, op, (len + n) % n);
        }
    }
    // Everyone to its right neighbour.
    if n > 1 {
        let (right, left) = ((me + 1) % n, (me + n - 1) % n);
        let sent = comm.send(samples::<T>(1, me, len), right, 3);
        let received = comm.recv::<T>(len, left, 3).wait().expect("the left neighbour sends");
        sent.wait().expect("the right neighbour receives");
        assert_eq!(bytes(&received), bytes(&samples::<T>(1, left, len)));
    }
}

/// The reductions that a training step makes, on long vectors.
pub(crate) fn long_collectives(comm: &Communicator, len: usize) {
    for kind in [Kind::AllReduce, Kind::ReduceScatter, Kind::AllGather] {
        one_collective::<f32>(comm, kind, kind.algorithms()[0], len, ReduceOp::Sum, 0);
    }
}

fn one_collective<T: Sample>(
    comm: &Communicator,
    kind: Kind,
    algorithm: Algorithm,
    len: usize,
    op: ReduceOp,
    root: usize,
) {
    let (me, n) = (comm.rank(), comm.size());
    let seed = len as u64 * 31 + kind as u64;
    let (dtype, at) = (T::DTYPE, Rank(root as u32));
    // An exclusive scan's shapes, an uneven gather: lengths that differ from rank to rank.
    let world = farwire_proto::WorldSize::new(n as u32).expect("a group has a rank");
    let counts: Vec<usize> = (0..n).map(|rank| (len + rank) / n).collect();
    let (call, input_len): (Call, &dyn Fn(usize) -> usize) = match kind {
        Kind::AllReduce => (Call::AllReduce { count: len, dtype, op }, &|_| len),
        Kind::ReduceScatter => (Call::ReduceScatter { count: len, dtype, op }, &|_| len),
        Kind::AllGather => {
            (Call::AllGather { counts: Counts::listed(counts.clone(), world), dtype }, &|rank| counts[rank])
        }
        Kind::Broadcast => (Call::Broadcast { count: len, dtype, root: at }, &|_| len),
        Kind::Reduce => (Call::Reduce { count: len, dtype, op, root: at }, &|_| len),
        Kind::Gather => (Call::Gather { counts: Counts::Each(len), dtype, root: at }, &|_| len),
        Kind::Scatter => (Call::Scatter { counts: Counts::Each(len), dtype, root: at }, &|rank| {
            if rank == root { len * n } else { 0 }
        }),
        Kind::AllToAll => {
            let each = Counts::Each(len);
            (Call::AllToAll { send: each.clone(), recv: each, dtype }, &|_| len * n)
        }
        Kind::Scan => (Call::Scan { count: len, dtype, op }, &|_| len),
        Kind::ExclusiveScan => (Call::ExclusiveScan { count: len, dtype, op }, &|_| len),
        Kind::Barrier => (Call::Barrier, &|_| 0),
        Kind::Message => unreachable!("messages are checked apart"),
    };
    let inputs: Vec<Vec<T>> = (0..n).map(|rank| samples(seed, rank, input_len(rank))).collect();
    let all_bytes: Vec<Vec<u8>> = inputs.iter().map(|input| bytes(input)).collect();
    let expected = oracle::results(&vec![call; n], algorithm, &all_bytes);
    let mine = inputs[me].clone();
    let comm = &comm.with_options(Options { algorithm: Some(algorithm), ..Options::default() });
    let result = match kind {
        Kind::AllReduce => comm.all_reduce(mine, op).wait().map(Some),
        Kind::ReduceScatter => comm.reduce_scatter(mine, op).wait().map(Some),
        Kind::AllGather => comm.all_gather_varied(mine, &counts).wait().map(Some),
        Kind::Broadcast => comm.broadcast((me == root).then_some(mine), len, root).wait().map(Some),
        Kind::Reduce => comm.reduce(mine, op, root).wait(),
        Kind::Gather => comm.gather(mine, root).wait(),
        Kind::Scatter => comm.scatter((me == root).then_some(mine), len, root).wait().map(Some),
        Kind::AllToAll => comm.all_to_all(mine).wait().map(Some),
        Kind::Scan => comm.scan(mine, op).wait().map(Some),
        Kind::ExclusiveScan => comm.exclusive_scan(mine, op).wait().map(Some),
        Kind::Barrier => comm.barrier().wait().map(|()| None),
        Kind::Message => unreachable!("messages are checked apart"),
    };
    let result = result.unwrap_or_else(|error| panic!("{kind} by {algorithm} on rank {me} of {n}: {error}"));
    let result = bytes(&result.unwrap_or_default());
    assert!(result == expected[me], "{kind} by {algorithm} of {len} {dtype} on rank {me} of {n} is wrong");
}

/// Three of five ranks work in a group, the other two in another way.
pub(crate) fn subgroups(comm: &Communicator) {
    let me = comm.rank();
    if me % 2 == 1 {
        let other = 4 - me;
        let sent = comm.send(vec![me as u32], other, 0);
        assert_eq!(comm.recv::<u32>(1, other, 0).wait().expect("it sends"), [other as u32]);
        sent.wait().expect("it receives");
    } else {
        let group = comm.subgroup(&[4, 0, 2], "even").expect("this is a member");
        assert_eq!((group.size(), group.rank()), (3, [1, 2, 0][me / 2]));
        for len in [0, 1, 1000] {
            every_collective::<f32>(&group, len, ReduceOp::Sum);
        }
        let members = group.all_gather(vec![me as u32]).wait().expect("all are here");
        assert_eq!(members, [4, 0, 2]);
    }
    comm.barrier().wait().expect("the world goes on");
}

/// Runs `rank` on a thread for each of `n` in-process ranks, and panics if any of them does.
pub(crate) fn on_threads(n: usize, rank: impl Fn(Communicator) + Sync) {
    let rank = &rank;
    std::thread::scope(|scope| {
        for comm in farwire::local(n).expect("shared memory") {
            scope.spawn(move || rank(comm));
        }
    });
}

/// Runs `rank` in a process for each of `n` ranks: the test starts itself again, `n` times, and panics if any of them fails.
///
/// `test` is the name of the calling test function, and `link` what FARWIRE_LINK is set to.
pub(crate) fn on_processes(test: &str, n: usize, link: &str, rank: impl Fn(Communicator)) {
    for (index, child) in start_processes(test, n, link, rank).into_iter().enumerate() {
        assert_succeeds(child, &format!("rank {index} of {n} over {link}"));
    }
}

/// Waits for a child, and shows what it said if it failed.
pub(crate) fn assert_succeeds(child: Child, who: &str) -> String {
    let output = child.wait_with_output().expect("a child ends");
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{who}:\n{text}");
    text
}

/// The children, in the parent. In a child, which has run `rank`, none.
pub(crate) fn start_processes(test: &str, n: usize, link: &str, rank: impl Fn(Communicator)) -> Vec<Child> {
    start_processes_with(test, n, link, &[], rank)
}

/// [`start_processes`], with more in the environment.
pub(crate) fn start_processes_with(
    test: &str,
    n: usize,
    link: &str,
    settings: &[(&str, &str)],
    rank: impl Fn(Communicator),
) -> Vec<Child> {
    let port = free_port();
    start_processes_at(test, &vec![port; n], &Token::generate(), link, settings, rank)
}

/// A UDP port of loopback that nobody uses right now.
pub(crate) fn free_port() -> u16 {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    socket.expect("a free port").port()
}

/// The same for a job whose token and ports, one for each rank to find rank 0 at, the test knows. A child's input ends when the test drops its end of it.
pub(crate) fn start_processes_at(
    test: &str,
    ports: &[u16],
    token: &Token,
    link: &str,
    settings: &[(&str, &str)],
    rank: impl Fn(Communicator),
) -> Vec<Child> {
    const MARK: &str = "FARWIRE_TEST_CASE";
    let n = ports.len();
    let case = format!("{test} {n} {link}");
    if let Ok(mark) = std::env::var(MARK) {
        if mark == case {
            end_after(CHILD_LIMIT);
            rank(Communicator::from_env().expect("all ranks come"));
        } // else it is another case of the same test
        return Vec::new();
    }
    let start = |(rank, port): (usize, &u16)| {
        Command::new(std::env::current_exe().expect("tests know where they are"))
            .args([test, "--exact", "--include-ignored", "--nocapture"])
            .env(MARK, &case)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", n.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("FARWIRE_TOKEN", token.reveal())
            .env("FARWIRE_LINK", link)
            .env("FARWIRE_FLIGHT_DIR", "")
            .envs(settings.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a test can start itself")
    };
    ports.iter().enumerate().map(start).collect()
}

/// How long a process of a test may live.
const CHILD_LIMIT: Duration = Duration::from_secs(600);

/// Ends this process after that time, so that a test whose ranks hang fails instead of hanging too.
fn end_after(limit: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        eprintln!("this process of a test has not ended in {limit:?}");
        std::process::abort();
    });
}

/// Megabytes of this process that are in memory.
pub(crate) fn resident_megabytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux says how large a process is");
    let pages = pages.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.expect("the second number is what is in memory") * rustix::param::page_size() / (1 << 20)
}
