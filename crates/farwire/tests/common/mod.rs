//! Every collective through the public API, checked by each rank against the simulator's oracle.

#![allow(dead_code, reason = "each test file uses its own share of this")]

pub(crate) mod relay;
pub(crate) mod stranger;

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use farwire::{Algorithm, Communicator, Element, Options, ReduceOp, Token};
use farwire_proto::{CommId, Counts, Kind, Plan, Rank, Tuning, WorldSize};
use farwire_sim::kinds::Shape;
use farwire_sim::oracle;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// All kinds of link between processes, by name.
pub(crate) fn links() -> impl Iterator<Item = &'static str> {
    farwire::LinkChoice::all().skip(1).map(farwire::LinkChoice::name)
}

/// One random element: an integer of any value, or a float of many magnitudes.
fn sample<T: Element>(rng: &mut ChaCha8Rng) -> T {
    let float = rng.random_range(-4.0..4.0f64) * 2f64.powi(rng.random_range(-12..12));
    let mut element = T::cast(float);
    if !T::DTYPE.is_float() {
        rng.fill(bytemuck::bytes_of_mut(&mut element));
    }
    element
}

/// Elements that every rank can make for every rank.
pub(crate) fn samples<T: Element>(seed: u64, rank: usize, count: usize) -> Vec<T> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ (rank as u64) << 32);
    (0..count).map(|_| sample(&mut rng)).collect()
}

fn bytes<T: Element>(elements: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(elements).to_vec()
}

/// Runs every collective with every algorithm on vectors of `len` elements, and panics on the first
/// wrong bit.
pub(crate) fn every_collective<T: Element>(comm: &Communicator, len: usize, op: ReduceOp) {
    let (me, n) = (comm.rank(), comm.size());
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Message) {
        for algorithm in kind.algorithms() {
            one_collective::<T>(comm, kind, *algorithm, len, op, (len + n) % n);
        }
    }
    // Every rank sends to its right neighbour.
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

fn one_collective<T: Element>(
    comm: &Communicator,
    kind: Kind,
    algorithm: Algorithm,
    len: usize,
    op: ReduceOp,
    root: usize,
) {
    let (me, n) = (comm.rank(), comm.size());
    let seed = len as u64 * 31 + kind as u64;
    let world = WorldSize::new(n as u32).expect("a group has a rank");
    // An uneven gather: lengths that differ from rank to rank.
    let counts: Vec<usize> = (0..n).map(|rank| (len + rank) / n).collect();
    let blocks = if kind == Kind::AllGather {
        Counts::listed(&counts[..], world)
    } else {
        Counts::Each(len)
    };
    let shape = Shape { root: Rank(root as u32), blocks, ..Shape::even(world, len, T::DTYPE, op) };
    let options = Options { algorithm: Some(algorithm), ..Options::default() };
    let call = |rank| shape.row(kind, rank).calls.swap_remove(0);
    let input_len = |rank| {
        let plan = Plan::new(CommId::WORLD, rank, world, &call(rank), &options, &Tuning::default());
        plan.expect("this is called right").input_bytes() / T::DTYPE.size()
    };
    let inputs: Vec<Vec<T>> =
        world.ranks().map(|rank| samples(seed, rank.index(), input_len(rank))).collect();
    let all_bytes: Vec<Vec<u8>> = inputs.iter().map(|input| bytes(input)).collect();
    let expected = oracle::results(kind, &shape, algorithm, &all_bytes);
    let mine = inputs[me].clone();
    let comm = &comm.with_options(options);
    // As a value, which works for all kinds; and by the methods that some kinds have.
    let by_value = comm.run(call(Rank(me as u32)), mine.clone()).wait().map(Some);
    let by_name = match kind {
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
        _ => Ok(by_value.as_ref().ok().cloned().flatten()),
    };
    for result in [by_value, by_name] {
        let result = result
            .unwrap_or_else(|error| panic!("{kind} by {algorithm} on rank {me} of {n}: {error}"));
        let result = bytes(&result.unwrap_or_default());
        let what = format!("{kind} by {algorithm} of {len} {}", T::DTYPE);
        assert!(result == expected[me], "{what} on rank {me} of {n} is wrong");
    }
}

/// Three of five ranks work in a group, while the other two exchange messages.
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

/// Runs `rank` in a process for each of `n` ranks: the test starts itself again, `n` times, and
/// panics if any of them fails.
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
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{who}:\n{text}");
    text
}

/// The children, in the parent. In a child, which has run `rank` by then, there are none.
pub(crate) fn start_processes(
    test: &str,
    n: usize,
    link: &str,
    rank: impl Fn(Communicator),
) -> Vec<Child> {
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

/// Tells the process of a rank which case of a test it belongs to.
const MARK: &str = "FARWIRE_TEST_CASE";

/// A port of loopback, for UDP and TCP, that nobody uses right now. It is below those that the
/// system hands out, so no process that asks for any port gets it before the rank that is told of
/// it.
pub(crate) fn free_port() -> u16 {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    if std::env::var_os(MARK).is_some() {
        return 0; // A rank was told its port. Trying others would disturb other tests.
    }
    let first = std::process::id();
    let ports = std::iter::repeat_with(|| {
        let number = first.wrapping_mul(64).wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed));
        10_000 + (number % 20_000) as u16
    });
    let free = |port: &u16| {
        std::net::UdpSocket::bind(("127.0.0.1", *port)).is_ok()
            && std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok()
    };
    ports.take(20_000).find(free).expect("a free port")
}

/// [`start_processes_with`], for a job whose token and ports the test knows; each rank has a port
/// to find rank 0 at. A child's input ends when the test drops its end of it.
pub(crate) fn start_processes_at(
    test: &str,
    ports: &[u16],
    token: &Token,
    link: &str,
    settings: &[(&str, &str)],
    rank: impl Fn(Communicator),
) -> Vec<Child> {
    start_each(test, ports, token, link, &|_| settings.to_vec(), rank)
}

/// [`start_processes`], on hosts with these names, as far as the ranks know.
pub(crate) fn start_processes_on(
    test: &str,
    hosts: &[&str],
    link: &str,
    rank: impl Fn(Communicator),
) -> Vec<Child> {
    let host = |rank: usize| vec![("FARWIRE_HOST", hosts[rank])];
    start_each(test, &vec![free_port(); hosts.len()], &Token::generate(), link, &host, rank)
}

/// [`start_processes_at`], with settings for each rank.
pub(crate) fn start_each<'a>(
    test: &str,
    ports: &[u16],
    token: &Token,
    link: &str,
    settings: &dyn Fn(usize) -> Vec<(&'a str, &'a str)>,
    rank: impl Fn(Communicator),
) -> Vec<Child> {
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
            .envs(settings(rank))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a test can start itself")
    };
    ports.iter().enumerate().map(start).collect()
}

/// Whether this process is a rank of a test that was started with another value of this variable.
pub(crate) fn is_another_case(variable: &str, value: &str) -> bool {
    std::env::var_os(MARK).is_some() && std::env::var(variable).is_ok_and(|told| told != value)
}

/// How long a process of a test may live.
pub(crate) const CHILD_LIMIT: Duration = Duration::from_secs(600);

/// Ends this process after that time, so that a test whose ranks hang fails instead of hanging too.
pub(crate) fn end_after(limit: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        eprintln!("this process of a test has not ended in {limit:?}");
        std::process::abort();
    });
}

/// Megabytes of this process that are in memory.
pub(crate) fn resident_megabytes() -> usize {
    let pages =
        std::fs::read_to_string("/proc/self/statm").expect("Linux says how large a process is");
    let pages = pages.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.expect("the second number is what is in memory") * rustix::param::page_size() / (1 << 20)
}
