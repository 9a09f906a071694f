//! One operation with its inputs, on every rank: the building block of the tests.

#![allow(dead_code, reason = "each test file uses its own share of this")]

use std::num::NonZeroUsize;

use farwire_proto::{
    Algorithm, Call, CallError, CommId, Counts, DType, Element, Kind, Options, Peer, Placement,
    Plan, Rank, ReduceOp, Tuning, WorldSize, with_type,
};
use farwire_sim::kinds::Shape;
use farwire_sim::{JobId, Network, Sim, Start, Submission, oracle};
use rand::RngExt;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

pub(crate) fn world(n: u32) -> WorldSize {
    WorldSize::new(n).unwrap()
}

/// Every collective, with every algorithm that can run it.
pub(crate) fn every_collective() -> Vec<(Kind, Algorithm)> {
    let collectives = Kind::ALL.into_iter().filter(|kind| *kind != Kind::Message);
    collectives
        .flat_map(|kind| kind.algorithms().iter().map(move |algorithm| (kind, *algorithm)))
        .collect()
}

/// The collectives that can leave their result where their input was.
pub(crate) fn every_in_place() -> Vec<(Kind, Algorithm)> {
    use Kind as K;
    let can = |(kind, _): &(Kind, Algorithm)| {
        matches!(kind, K::AllReduce | K::Reduce | K::ReduceScatter | K::AllGather | K::Broadcast)
    };
    every_collective().into_iter().filter(can).collect()
}

/// A collective as all ranks of a world call it.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    pub(crate) shape: Shape,
    pub(crate) calls: Vec<Call>,
    pub(crate) options: Options,
    pub(crate) inputs: Vec<Vec<u8>>,
}

impl Case {
    /// `kind` over `n` ranks, on vectors of about `len` elements of random values. Lengths may
    /// differ between ranks where the kind allows.
    pub(crate) fn new(
        (kind, algorithm): (Kind, Algorithm),
        n: u32,
        len: usize,
        segment: usize,
        dtype: DType,
        op: ReduceOp,
        seed: u64,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let root = Rank(rng.random_range(0..n));
        let varied = rng.random::<bool>();
        let mut counts = || -> Counts {
            if varied {
                let most = (2 * len / n as usize).max(1);
                Counts::listed(
                    (0..n).map(|_| rng.random_range(0..=most)).collect::<Vec<_>>(),
                    world(n),
                )
            } else {
                Counts::Each(len / n as usize)
            }
        };
        let blocks = counts();
        let matrix = (0..n).map(|_| counts()).collect();
        // On one host, on as many as there are ranks, or anything between.
        let most = rng.random_range(1..=n);
        let hosts = match algorithm {
            Algorithm::TwoLevel => (0..n).map(|_| rng.random_range(0..most).into()).collect(),
            _ => Vec::new(),
        };
        let mut shape =
            Shape { world: world(n), count: len, dtype, op, root, blocks, matrix, hosts };
        let call = |shape: &Shape, rank| shape.row(kind, rank).calls.swap_remove(0);
        let plan = plan(Rank(0), &shape, &call(&shape, Rank(0)), &Options::default());
        if let Err(CallError::ScanMean(_) | CallError::IntegerMean(_)) = plan {
            shape.op = ReduceOp::Sum;
        }
        let calls = world(n).ranks().map(|rank| call(&shape, rank)).collect();
        let options = Options {
            algorithm: Some(algorithm),
            segment: NonZeroUsize::new(segment),
            deadline: None,
        };
        let mut case = Self { kind, shape, calls, options, inputs: Vec::new() };
        case.inputs = case
            .plans()
            .iter()
            .map(|plan| random_elements(dtype, plan.input_bytes(), &mut rng))
            .collect();
        case
    }

    /// The same, with input and output in one memory.
    pub(crate) fn in_place(self) -> Self {
        let calls = self.calls.into_iter().map(|call| Call::InPlace(Box::new(call))).collect();
        Self { calls, ..self }
    }

    /// A network with the hosts of this case, if it has any; links on a host are like those between
    /// hosts.
    pub(crate) fn on(&self, network: Network) -> Network {
        let hosts = Some(self.shape.hosts.clone()).filter(|hosts| !hosts.is_empty());
        Network { local: network.link, hosts, ..network }
    }

    pub(crate) fn plans(&self) -> Vec<Plan> {
        let n = world(self.calls.len() as u32);
        self.calls
            .iter()
            .zip(n.ranks())
            .map(|(call, me)| plan(me, &self.shape, call, &self.options).unwrap())
            .collect()
    }

    /// Which ranks' inputs each element of a rank's result is made of, as a bit set.
    pub(crate) fn contributors(&self, rank: usize) -> Vec<u32> {
        let parts = self.shape.row(self.kind, Rank(rank as u32)).parts;
        let set = |from: &[usize]| from.iter().fold(0, |set, rank| set | 1 << rank);
        parts
            .iter()
            .flat_map(|part| std::iter::repeat_n(set(&part.from), part.span.len()))
            .collect()
    }

    pub(crate) fn expected(&self) -> Vec<Vec<u8>> {
        oracle::results(self.kind, &self.shape, self.options.algorithm.unwrap(), &self.inputs)
    }

    /// Has rank r of `comm`, which is `members[r]`, make its call.
    pub(crate) fn submit_on(
        &self,
        sim: &mut Sim,
        comm: CommId,
        members: &[Peer],
        start: &dyn Fn(usize) -> Start,
    ) -> Vec<JobId> {
        (0..members.len())
            .map(|rank| {
                let submission = Submission {
                    comm,
                    call: self.calls[rank].clone(),
                    options: self.options,
                    input: self.inputs[rank].clone(),
                    coded: None,
                    start: start(rank),
                };
                sim.submit(members[rank], submission)
            })
            .collect()
    }

    /// Has every rank of the world make its call at the beginning.
    pub(crate) fn submit(&self, sim: &mut Sim) -> Vec<JobId> {
        let members: Vec<_> = (0..self.calls.len() as u32).map(Peer).collect();
        self.submit_on(sim, CommId::WORLD, &members, &|_| Start::At(farwire_proto::Time::ZERO))
    }
}

fn plan(me: Rank, shape: &Shape, call: &Call, options: &Options) -> Result<Plan, CallError> {
    let placement =
        Placement::new(&shape.hosts).unwrap_or_else(|| Placement::one_host(shape.world));
    Plan::placed(CommId::WORLD, me, &placement, call, options, &Tuning::default())
}

/// Random elements: integers of all values; floats of many magnitudes, so that every order of
/// addition rounds differently.
pub(crate) fn random_elements(dtype: DType, bytes: usize, rng: &mut ChaCha8Rng) -> Vec<u8> {
    let mut result = Vec::with_capacity(bytes);
    while result.len() < bytes {
        let small = rng.random_range(-4.0..4.0f64);
        let wide = small * 2f64.powi(rng.random_range(-12..12));
        let float = if dtype == DType::F16 { small } else { wide };
        if dtype.is_float() {
            with_type!(dtype, T => result.extend(bytemuck::bytes_of(&T::cast(float))));
        } else {
            result.extend((0..dtype.size()).map(|_| rng.random::<u8>()));
        }
    }
    assert_eq!(result.len(), bytes);
    result
}
