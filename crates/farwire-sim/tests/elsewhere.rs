//! Tier 2: ranks whose vectors are outside host memory, among ranks whose vectors are in it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::any::Any;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use farwire_codec::collective::{
    ChunkPlace, CodedCollective, Collective, Floats, Order, StepError, Task, Vectors,
};
use farwire_codec::{Context, Encoded, ErrorFeedback, Job, Transaction};
use farwire_proto::{DType, Peer, Rank, ReduceOp, WorldSize};
use farwire_sim::{JobEnd, Network, Sim, Submission};

/// The steps of an operation, by the methods of [`Vectors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Encode,
    Sum,
    EncodeSum,
    Decode,
    Finish,
}

/// A device of plain vectors, which can be made to fail. Messages are kept where they were made.
#[derive(Debug)]
struct Device {
    input: Vec<f32>,
    output: Vec<f32>,
    result: Arc<Mutex<Vec<f32>>>,
    feedback: Option<Transaction>,
    own: Vec<Vec<u8>>,
    sum: Vec<f32>,
    fails: Option<Step>,
}

impl Device {
    fn step(&self, step: Step) -> Result<(), StepError> {
        match self.fails {
            Some(fails) if fails == step => Err(StepError::Device("it is on fire".into())),
            _ => Ok(()),
        }
    }

    fn seal(message: &[u8]) -> Bytes {
        [message, &[0]].concat().into()
    }
}

impl Vectors for Device {
    fn len(&self) -> usize {
        self.input.len()
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn feedback_mut(&mut self) -> Option<&mut Transaction> {
        self.feedback.as_mut()
    }

    fn encode(&mut self, chunk: &ChunkPlace<'_>) -> Result<Vec<Bytes>, StepError> {
        self.step(Step::Encode)?;
        let feedback = self.feedback.as_mut().unwrap();
        let (owed, mut out) = (feedback.worker(chunk.range.clone()), Encoded::default());
        let (place, shards) = (chunk.whole(), chunk.local_shards());
        let values = &self.input[chunk.range.clone()];
        let job = Job::worker(values, owed.residual(), &place, &shards);
        chunk.codec.encode(&Job { rank: chunk.rank.0, ..job }, &mut out)?;
        feedback.set_worker(chunk.range.start, out.residual);
        let mut parcels: Vec<_> = out.messages.iter().map(|message| Self::seal(message)).collect();
        parcels[chunk.rank.index()].clear();
        self.own = vec![out.messages[chunk.rank.index()].clone()];
        Ok(parcels)
    }

    fn sum(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        self.step(Step::Sum)?;
        let place = chunk.shard(chunk.rank);
        self.sum = vec![0.0; place.range.len()];
        for from in chunk.world.ranks() {
            let own = from == chunk.rank;
            let message = if own { &self.own[0] } else { messages[from.index()] };
            let added = match from.index() {
                0 => chunk.codec.decode_into(message, &place, &mut self.sum),
                _ => chunk.codec.add_decoded_into(message, &place, &mut self.sum),
            };
            added.map_err(|why| StepError::Decode { from, why })?;
        }
        Ok(())
    }

    fn encode_sum(&mut self, chunk: &ChunkPlace<'_>) -> Result<Bytes, StepError> {
        self.step(Step::EncodeSum)?;
        let shard = chunk.shards[chunk.rank.index()].clone();
        let feedback = self.feedback.as_mut().unwrap();
        let (owed, mut out) = (feedback.owner(shard.clone()), Encoded::default());
        let place = chunk.shard(chunk.rank);
        let job = Job::owner(&self.sum, owed.residual(), &place);
        chunk.codec.encode(&Job { rank: chunk.rank.0, ..job }, &mut out)?;
        feedback.set_owner(shard.start, out.residual);
        self.own = out.messages;
        Ok(Self::seal(&self.own[0]))
    }

    fn decode(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        self.step(Step::Decode)?;
        for from in chunk.world.ranks() {
            let own = from == chunk.rank;
            let message = if own { &self.own[0] } else { messages[from.index()] };
            let out = &mut self.output[chunk.shards[from.index()].clone()];
            chunk
                .codec
                .decode_into(message, &chunk.shard(from), out)
                .map_err(|why| StepError::Decode { from, why })?;
            if chunk.mean {
                out.iter_mut().for_each(|value| *value /= chunk.world.get() as f32);
            }
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<(), String> {
        self.step(Step::Finish).map_err(|error| error.to_string())?;
        *self.result.lock().unwrap() = std::mem::take(&mut self.output);
        if let Some(feedback) = self.feedback.take() {
            feedback.commit();
        }
        Ok(())
    }

    fn abandon(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(self.input)
    }
}

const RANKS: u32 = 3;
const LEN: usize = 1009;

fn gradient(rank: u32) -> Vec<f32> {
    (0..LEN).map(|i| ((i as f32 + 3.0) * (rank as f32 + 1.5)).sin()).collect()
}

fn task(codec: &str, rank: u32) -> Task {
    Task {
        collective: Collective::AllReduce(ReduceOp::Mean),
        codec: codec.parse().unwrap(),
        rank: Rank(rank),
        world: WorldSize::new(RANKS).unwrap(),
        placement: None,
        dimensions: None,
        tensor: "w".into(),
        context: Context { seed: 5, step: 2, tensor: Context::tensor_id("w") },
    }
}

fn order(codec: &str, rank: u32, feedback: Option<Transaction>) -> Order {
    let Task { collective, codec, rank, world, dimensions, tensor, context, .. } =
        task(codec, rank);
    Order {
        collective,
        codec,
        rank,
        world,
        placement: None,
        input: Floats::F32(gradient(rank.0)),
        dimensions,
        tensor,
        feedback,
        context,
        threads: NonZeroUsize::MIN,
        output: Vec::new(),
    }
}

/// How each rank ends, what the device of rank 1 has at the end, and all residuals.
struct Run {
    ends: Vec<JobEnd>,
    result: Vec<f32>,
    owed: Vec<Vec<u8>>,
}

/// An all-reduce, with the vectors of rank 1 on a device unless `device` is `None`.
fn run(codec: &str, device: Option<Option<Step>>) -> Run {
    let feedback: Vec<_> = (0..RANKS).map(|_| ErrorFeedback::new()).collect();
    let mut sim = Sim::new(Network::lan(RANKS));
    let result = Arc::new(Mutex::new(Vec::new()));
    for rank in 0..RANKS {
        let owed = Some(feedback[rank as usize].begin("w").unwrap());
        let exchange = match device {
            Some(fails) if rank == 1 => {
                let vectors = Device {
                    input: gradient(rank),
                    output: vec![f32::NAN; LEN],
                    result: result.clone(),
                    feedback: owed,
                    own: Vec::new(),
                    sum: Vec::new(),
                    fails,
                };
                CodedCollective::elsewhere(task(codec, rank), Box::new(vectors)).unwrap()
            }
            _ => CodedCollective::new(order(codec, rank, owed)).unwrap(),
        };
        sim.submit(Peer(rank), Submission::coded(exchange));
    }
    let report = sim.run().unwrap();
    let ends = report.jobs().iter().map(|job| job.end.clone()).collect();
    let result = std::mem::take(&mut *result.lock().unwrap());
    Run { ends, result, owed: feedback.iter().map(ErrorFeedback::to_bytes).collect() }
}

#[test]
fn a_device_among_hosts_makes_no_difference() {
    for codec in ["int8", "topk:0.05", "sign", "randk:0.1"] {
        let (hosts, mixed) = (run(codec, None), run(codec, Some(None)));
        let JobEnd::Done(want) = &hosts.ends[0] else { panic!("{:?}", hosts.ends[0]) };
        assert!(matches!(&mixed.ends[0], JobEnd::Done(got) if got == want), "{codec}");
        assert_eq!(bytemuck::cast_slice::<f32, u8>(&mixed.result), want, "{codec}");
        assert_eq!(mixed.owed, hosts.owed, "{codec}");
    }
}

#[test]
fn a_device_that_fails_is_an_error_on_every_rank_and_changes_no_residuals() {
    for codec in ["int8", "topk:0.05"] {
        for step in [Step::Encode, Step::Sum, Step::EncodeSum] {
            let Run { ends, result, owed } = run(codec, Some(Some(step)));
            for (rank, end) in ends.iter().enumerate() {
                let JobEnd::NotEncodable { error, .. } = end else {
                    panic!("{step:?} {rank}: {end:?}")
                };
                let why = if rank == 1 { "it is on fire" } else { "that rank's own error" };
                let text = error.to_string();
                assert!(text.contains("rank 1 could not work on tensor `w`"), "{text}");
                assert!(text.contains(why), "{step:?} {rank}: {text}");
            }
            assert!(result.is_empty(), "{step:?}");
            assert!(owed.iter().all(|owed| *owed == ErrorFeedback::new().to_bytes()), "{step:?}");
        }
        // No rank waits for this one any more: the others have their result.
        for step in [Step::Decode, Step::Finish] {
            let Run { ends, result, owed } = run(codec, Some(Some(step)));
            assert!(matches!(&ends[0], JobEnd::Done(_)), "{step:?}");
            assert!(matches!(&ends[1], JobEnd::NotEncodable { .. }), "{step:?}");
            assert!(result.is_empty() && owed[1] == ErrorFeedback::new().to_bytes(), "{step:?}");
        }
    }
}

#[test]
fn codecs_that_need_the_host_say_so() {
    let device = Device {
        input: gradient(0),
        output: Vec::new(),
        result: Arc::default(),
        feedback: None,
        own: Vec::new(),
        sum: Vec::new(),
        fails: None,
    };
    let error = CodedCollective::elsewhere(task("powersgd:2", 0), Box::new(device)).unwrap_err();
    assert!(error.to_string().contains("powersgd:2 does not work on vectors outside"), "{error}");
}
