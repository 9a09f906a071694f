//! Tier 3: codecs chosen by measuring. What is chosen depends on the machine; that all ranks choose
//! the same, and get what the chosen codec gives, does not.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use common::{on_processes, on_threads};
use farwire::{CodecChoice, CodecPolicy, Communicator, Compressor, DType, Fault, ReduceOp};

fn gradient(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 31 + rank * 17) % 101) as f32 / 50.0 - 1.0).collect()
}

/// With a codec by length, every call gives what the codec of its length gives.
fn equals_the_codec_of_its_length(comm: &Communicator, policy: &CodecPolicy) {
    for len in [0, 1000, 1024, 5000, 70_000] {
        let mine = gradient(comm.rank(), len);
        // For an all-gather, the result's length counts.
        let part = mine[..len / comm.size()].to_vec();
        let both = |compressor: Compressor, other: Compressor| {
            let reduced = comm.all_reduce_compressed(
                "r",
                mine.clone(),
                ReduceOp::Sum,
                &compressor.at_step(1),
            );
            let gathered = comm.all_gather_compressed("g", part.clone(), &other.at_step(1));
            (reduced.wait().unwrap(), gathered.wait().unwrap())
        };
        let codec = |len| Compressor::new(policy.codec_for(len, DType::F32));
        let by_size = Compressor::by_size(policy.clone());
        let expected = both(codec(len), codec(part.len() * comm.size()));
        assert_eq!(both(by_size.clone(), by_size), expected, "{policy}, {len}");
    }
}

fn all_ranks_choose_alike(comm: &Communicator) {
    for choice in ["auto", "auto:topk:0.05"] {
        let policy = choice.parse::<CodecChoice>().unwrap().settle(comm, comm).unwrap();
        assert!(comm.is_in_sync(policy.to_string().as_bytes()).unwrap(), "{policy}");
        assert!(comm.size() > 1 || policy.is_dense(), "{policy}");
        equals_the_codec_of_its_length(comm, &policy);
    }
}

#[test]
fn threads_choose_alike() {
    for ranks in [1, 2, 3] {
        on_threads(ranks, |comm| all_ranks_choose_alike(&comm));
    }
}

#[test]
fn processes_choose_alike() {
    for link in common::links() {
        on_processes("processes_choose_alike", 3, link, |comm| {
            all_ranks_choose_alike(&comm);
            comm.shutdown().unwrap();
        });
    }
}

#[test]
fn groups_of_one_world_choose_alike() {
    on_threads(4, |world| {
        let group = world.split(world.rank() as u32 % 2, 0).unwrap();
        let policy = CodecChoice::Auto.settle(&group, &world).unwrap();
        assert!(world.is_in_sync(policy.to_string().as_bytes()).unwrap(), "{policy}");
    });
}

#[test]
fn each_length_takes_its_codec() {
    let policy: CodecPolicy = "bf16 from 4 KiB (1.5×); int8 from 256 KiB (3×)".parse().unwrap();
    on_threads(3, |comm| {
        equals_the_codec_of_its_length(&comm, &policy);
        // What is owed is kept by name, whichever codec owes it.
        let compressor = Compressor::by_size(policy.clone());
        for (name, len, owes) in
            [("short", 1000, false), ("middle", 5000, true), ("long", 70_000, true)]
        {
            let mine = gradient(comm.rank(), len);
            comm.all_reduce_compressed(name, mine, ReduceOp::Mean, &compressor).wait().unwrap();
            let norms = compressor.feedback().unwrap().norms(name);
            assert_eq!(norms.is_some_and(|norms| norms.worker > 0.0), owes, "{name}");
        }
    });
}

/// One rank chooses. The other does something else, or chooses among other codecs.
#[test]
fn ranks_that_do_not_choose_together_get_an_error() {
    for other in 0..3 {
        on_threads(2, |comm| {
            let error = match (comm.rank(), other) {
                (0, _) => CodecChoice::Auto.settle(&comm, &comm).unwrap_err(),
                (_, 0) => comm.all_reduce(vec![1.0f32; 1024], ReduceOp::Sum).wait().unwrap_err(),
                (_, 1) => comm.barrier().wait().unwrap_err(),
                _ => "auto:topk:0.01"
                    .parse::<CodecChoice>()
                    .unwrap()
                    .settle(&comm, &comm)
                    .unwrap_err(),
            };
            assert!(matches!(error.fault(), Some(Fault::Desync(..))), "{other}: {error}");
        });
    }
}
