//! Tier 3: requests and responses.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::time::Duration;

use common::{on_processes, on_threads};
use farwire::{Communicator, Error, ReduceOp};

const LONG: Duration = Duration::from_secs(60);

fn serve_and_call(comm: &Communicator) {
    let me = comm.rank();
    comm.register("echo", move |from, mut request| {
        request.push(from as u8);
        request.push(me as u8);
        Ok(request)
    })
    .unwrap();
    comm.register("fail", |_, request| Err(format!("{} bytes are wrong", request.len()))).unwrap();
    comm.register("panic", |_, _| panic!("a handler may")).unwrap();
    let inner = comm.clone();
    comm.register("relay", move |_, request| {
        let next = (inner.rank() + 1) % inner.size();
        inner.call(next, "echo", request, LONG).wait().map_err(|error| error.to_string())
    })
    .unwrap();
    comm.barrier().wait().unwrap();

    for to in 0..comm.size() {
        // Many at once, of all lengths, some several frames long, and a collective between them.
        let lens = [0, 1, 1000, 65_536, 200_000];
        let calls: Vec<_> =
            lens.iter().map(|len| comm.call(to, "echo", vec![7; *len], LONG)).collect();
        assert_eq!(comm.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [comm.size() as i32]);
        for (call, len) in calls.into_iter().zip(lens) {
            let answer = call.wait().unwrap();
            assert!(answer[..len].iter().all(|byte| *byte == 7));
            assert_eq!(answer[len..], [me as u8, to as u8]);
        }
        let relayed = comm.call(to, "relay", vec![], LONG).wait().unwrap();
        assert_eq!(relayed, [to as u8, ((to + 1) % comm.size()) as u8]);
        for (name, says) in [
            ("fail", "3 bytes are wrong"),
            ("panic", "panicked"),
            ("nothing", "nobody has registered `nothing`"),
        ] {
            let error = comm.call(to, name, vec![1, 2, 3], LONG).wait().unwrap_err();
            assert!(matches!(&error, Error::Remote { rank, .. } if *rank == to), "{error}");
            assert!(error.to_string().contains(says), "{error}");
        }
    }
    comm.barrier().wait().unwrap();
}

#[test]
fn any_rank_calls_any_rank() {
    for n in [1, 2, 3, 5] {
        on_threads(n, |comm| {
            serve_and_call(&comm);
            let halves = comm.split((comm.rank() % 2) as u32, 0).unwrap();
            serve_and_call(&halves);
        });
    }
}

#[test]
fn any_process_calls_any_process() {
    for link in common::links() {
        on_processes("any_process_calls_any_process", 3, link, |comm| {
            serve_and_call(&comm);
            comm.shutdown().unwrap();
        });
    }
}

/// Three ranks make 300 requests each to one rank: far more than it runs handlers at once.
#[test]
fn more_calls_than_handlers_wait_their_turn() {
    on_threads(3, |comm| {
        comm.register("add", |_, request| Ok(vec![request[0] + 1])).unwrap();
        let calls: Vec<_> =
            (0..300u32).map(|i| comm.call(0, "add", vec![i as u8 / 2], LONG)).collect();
        for (i, call) in calls.into_iter().enumerate() {
            assert_eq!(call.wait().unwrap(), [i as u8 / 2 + 1]);
        }
        comm.barrier().wait().unwrap();
    });
}

#[test]
fn a_call_that_nobody_answers_ends_at_its_deadline() {
    on_threads(2, |comm| {
        if comm.rank() == 0 {
            let error =
                comm.call(1, "anything", vec![], Duration::from_millis(20)).wait().unwrap_err();
            assert!(matches!(error, Error::Unanswered { rank: 1, .. }), "{error}");
            let error = comm.call(9, "anything", vec![], LONG).wait().unwrap_err();
            assert!(error.to_string().contains("outside this communicator"), "{error}");
        }
        comm.barrier().wait().unwrap();
        // Late answers go nowhere, and hurt nobody.
        comm.register("anything", |_, _| Ok(vec![])).unwrap();
        comm.barrier().wait().unwrap();
        assert!(comm.call(1 - comm.rank(), "anything", vec![], LONG).wait().unwrap().is_empty());
        comm.barrier().wait().unwrap();
    });
}

/// Calls are futures, too.
#[test]
fn calls_can_be_awaited() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut ranks = farwire::local(2).unwrap();
    let (b, a) = (ranks.pop().unwrap(), ranks.pop().unwrap());
    b.register("double", |_, request| Ok(request.repeat(2))).unwrap();
    let answer = runtime.block_on(async { a.call(1, "double", vec![1, 2], LONG).await });
    assert_eq!(answer.unwrap(), [1, 2, 1, 2]);
}

/// A rank that never answers costs its callers their calls, and nothing else; one that dies ends
/// them at once.
#[test]
fn unanswered_calls_do_not_stop_collectives() {
    on_threads(2, |comm| {
        if comm.rank() == 1 {
            let calls: Vec<_> = (0..300)
                .map(|_| comm.call(0, "x", vec![0; 100], Duration::from_millis(20)))
                .collect();
            for call in calls {
                assert!(matches!(call.wait(), Err(Error::Unanswered { .. })));
            }
        }
        let options = farwire::Options { deadline: Some(LONG), ..farwire::Options::default() };
        let sum = comm
            .with_options(options)
            .all_reduce(vec![1.0f32; 100_000], ReduceOp::Sum)
            .wait()
            .unwrap();
        assert_eq!(sum[0], 2.0);
    });
}
