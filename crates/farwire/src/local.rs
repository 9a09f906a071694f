//! Ranks as threads of one process.

use farwire_proto::membership::Settings;
use farwire_proto::{Config, Engine, Peer, WorldSize};

use crate::comm::Communicator;
use crate::driver::Driver;
use crate::driver::members::Members;
use crate::error::Error;
use crate::link::Link;
use crate::node::Node;
use crate::observe::Observer;
use crate::process::longest_payload;
use crate::settings::default_config;
use crate::shm::bell::Bell;
use crate::shm::link::SharedLink;
use crate::shm::ring;

/// The name of links between threads.
pub(crate) const INPROC: &str = "inproc";

/// A world of `ranks` ranks in this process, for tests and notebooks: give one communicator to each
/// of as many threads.
///
/// ```
/// use farwire::ReduceOp;
///
/// let sums: Vec<f32> = std::thread::scope(|scope| {
///     let threads: Vec<_> = farwire::local(4)?
///         .into_iter()
///         .map(|comm| {
///             scope.spawn(move || {
///                 let mine = vec![comm.rank() as f32; 1000];
///                 let sum = comm.all_reduce(mine, ReduceOp::Sum).wait()?;
///                 Ok::<_, farwire::Error>(sum[0])
///             })
///         })
///         .collect();
///     threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<_, _>>()
/// })?;
/// assert_eq!(sums, [6.0; 4]);
/// # Ok::<(), farwire::Error>(())
/// ```
///
/// # Panics
///
/// If `ranks` is zero or does not fit 32 bits.
pub fn local(ranks: usize) -> Result<Vec<Communicator>, Error> {
    local_with(ranks, default_config())
}

/// [`local`], with settings.
///
/// # Panics
///
/// If `ranks` is zero or does not fit 32 bits.
pub fn local_with(ranks: usize, config: Config) -> Result<Vec<Communicator>, Error> {
    local_on_hosts(&vec![0; ranks], config)
}

/// [`local_with`], as if the ranks were on several hosts: `hosts[r]` is the number of rank r's
/// host. An all-reduce then takes the same way as between such hosts, though all of it is through
/// memory.
///
/// # Panics
///
/// If there are no ranks, or more than fit 32 bits.
pub fn local_on_hosts(hosts: &[u64], config: Config) -> Result<Vec<Communicator>, Error> {
    let start = |(driver, bell)| {
        let node = Node::start(driver, bell, hosts.len(), None, None)
            .map_err(|error| Error::System { what: "could not start a thread", error })?;
        Communicator::of_world(node)
    };
    drivers(hosts, config)?.into_iter().map(start).collect()
}

/// The drivers of these ranks, with links to each other, and the bells that wake them.
pub(crate) fn drivers(hosts: &[u64], config: Config) -> Result<Vec<(Driver, Bell)>, Error> {
    let ranks = hosts.len();
    let world = u32::try_from(ranks).ok().and_then(WorldSize::new);
    let world = world.expect("a world has 1 to 2³² − 1 ranks");
    let system = |error| Error::System { what: "could not get shared memory", error };
    let payload = longest_payload(&config, true);
    let bells = (0..ranks).map(|_| Bell::new()).collect::<Result<Vec<_>, _>>().map_err(system)?;
    let mut links: Vec<Vec<Option<Box<dyn Link>>>> =
        (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
    for (a, b) in (0..ranks).flat_map(|a| (a + 1..ranks).map(move |b| (a, b))) {
        let region = || Ok::<_, Error>(ring::region(payload).map_err(system)?.close_file());
        let (to_b, from_a) = ring::pair(region()?, payload, Peer(a as u32));
        let (to_a, from_b) = ring::pair(region()?, payload, Peer(b as u32));
        links[a][b] = Some(Box::new(SharedLink::new(to_b, from_b, bells[b].clone(), None)));
        links[b][a] = Some(Box::new(SharedLink::new(to_a, from_a, bells[a].clone(), None)));
    }
    let driver = |(rank, links)| {
        let engine = Engine::on_hosts(Peer(rank), hosts, config);
        let observer = Observer::quiet(Peer(rank), world, config.epoch);
        let members = Members::founding(Peer(rank), world, Settings::default());
        Driver::new(engine, links, payload, observer, members)
    };
    Ok((0..).zip(links).map(driver).zip(bells).collect())
}
