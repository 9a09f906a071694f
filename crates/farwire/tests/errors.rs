//! Errors as programs see them: with the input, and said once.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::io;

use common::on_threads;
use farwire::codec::EncodeError;
use farwire::{
    Algorithm, CodecChoice, CodecSpec, Compressor, DecodeError, Error, ErrorFeedback, Fault,
    JoinError, Options, Place, ReduceOp, Token,
};

/// Whether something in a chain of errors, as `anyhow` prints them one below the other, is said
/// again further down.
fn repeats_itself(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut texts = vec![error.to_string()];
    let mut next = error.source();
    while let Some(error) = next {
        let text = error.to_string();
        if texts.iter().any(|said| said.contains(&text)) {
            return true;
        }
        texts.push(text);
        next = error.source();
    }
    false
}

#[test]
fn no_error_says_what_its_source_says_again() {
    let refused = || io::Error::other("the system said no");
    let not_a_codec = "no such codec";
    let file = std::path::Path::new("/no/such/directory/feedback");
    let mut errors: Vec<Box<dyn std::error::Error>> = vec![
        Box::new(Error::System { what: "could not do it", error: refused() }),
        Box::new(JoinError::Resolve { host: "nowhere".into(), error: refused() }),
        Box::new(JoinError::Listen { address: "127.0.0.1:1".parse().unwrap(), error: refused() }),
        Box::new(Error::from(JoinError::Resolve { host: "nowhere".into(), error: refused() })),
        Box::new(not_a_codec.parse::<CodecChoice>().unwrap_err()),
        Box::new(not_a_codec.parse::<CodecSpec>().unwrap_err()),
        Box::new(EncodeError::OwnMessage(DecodeError::Field("panic"))),
        Box::new(ErrorFeedback::from_bytes(b"not a file").unwrap_err()),
        Box::new(ErrorFeedback::new().save(file).unwrap_err()),
        Box::new(Error::from(ErrorFeedback::load(file).unwrap_err())),
        Box::new(Error::Token { error: "weak".parse::<Token>().unwrap_err() }),
    ];
    errors.extend(Place::from_env().err().map(|error| Box::new(Error::from(error)) as _));
    let comm = farwire::local(1).unwrap().pop().unwrap();
    errors.push(Box::new(comm.subgroup(&[], "none").unwrap_err()));
    errors.push(Box::new(comm.send(vec![1u8], 3, 0).wait().unwrap_err()));
    for error in &errors {
        assert!(!repeats_itself(&**error), "{error}");
    }
    on_threads(2, |comm| {
        if comm.rank() == 0 {
            let error = comm.barrier().wait().unwrap_err();
            assert!(!repeats_itself(&error), "{error}");
        }
    });
    // And the check itself can fail.
    #[derive(Debug, thiserror::Error)]
    #[error("it failed: {source}")]
    struct Twice {
        source: io::Error,
    }
    assert!(repeats_itself(&Twice { source: refused() }));
}

#[test]
fn refused_calls_give_their_vector_back() {
    on_threads(2, |comm| {
        let ints = || vec![1i32, 2, 3];
        let mut refused = vec![
            comm.all_reduce(ints(), ReduceOp::Mean).wait().unwrap_err(),
            comm.reduce(ints(), ReduceOp::Sum, 2).wait().unwrap_err(),
            comm.all_gather_varied(ints(), &[3]).wait().unwrap_err(),
            comm.all_gather_varied(ints(), &[4, 4]).wait().unwrap_err(),
            comm.scan(ints(), ReduceOp::Mean).wait().unwrap_err(),
            comm.all_to_all(ints()).wait().unwrap_err(),
            comm.send(ints(), comm.rank(), 0).wait().unwrap_err(),
            comm.in_place().all_reduce(ints(), ReduceOp::Mean).wait().unwrap_err(),
            comm.with_options(Options { algorithm: Some(Algorithm::Tree), ..Options::default() })
                .all_reduce(ints(), ReduceOp::Sum)
                .wait()
                .unwrap_err(),
        ];
        if comm.rank() == 0 {
            refused.push(comm.broadcast(Some(ints()), 4, 0).wait().unwrap_err());
            refused.push(comm.scatter(Some(ints()), 4, 0).wait().unwrap_err());
        }
        for mut error in refused {
            assert!(matches!(error, Error::Call { .. }), "{error}");
            assert_eq!(error.take_input::<f32>(), None);
            assert_eq!(error.take_input::<i32>(), Some(ints()), "{error}");
            assert_eq!(error.take_input::<i32>(), None, "once");
        }

        // Through a codec: a gather that it cannot do, an operator, a tensor in use.
        let floats = || vec![1.0f32; 64];
        let power = Compressor::new("powersgd:2".parse().unwrap());
        let mut order = comm.all_gather_compressed("w", floats(), &power).wait().unwrap_err();
        assert!(matches!(order, Error::Order { .. }), "{order}");
        assert_eq!(order.take_input::<f32>(), Some(floats()));
        let mut call =
            comm.all_reduce_compressed("w", floats(), ReduceOp::Max, &power).wait().unwrap_err();
        assert!(matches!(call, Error::Call { .. }), "{call}");
        assert_eq!(call.take_input::<f32>(), Some(floats()));
        let first = comm.all_reduce_compressed("w", floats(), ReduceOp::Sum, &power);
        let mut busy =
            comm.all_reduce_compressed("w", floats(), ReduceOp::Sum, &power).wait().unwrap_err();
        assert!(matches!(busy, Error::Feedback { .. }), "{busy}");
        assert_eq!(busy.take_input::<f32>(), Some(floats()));
        first.wait().unwrap();
    });
}

/// A refused call sends nothing, so the others wait for this rank's next: the call as it should
/// have been, or another one, which is an error on all ranks.
#[test]
fn a_call_that_is_refused_on_one_rank_was_not_made() {
    let ints = || vec![1i32, 2, 3];
    on_threads(2, |comm| {
        let refuse = || {
            if comm.rank() == 0 {
                let error = comm.all_gather_varied(ints(), &[4, 4]).wait().unwrap_err();
                assert!(matches!(error, Error::Call { .. }), "{error}");
            }
        };
        refuse();
        let all = comm.all_gather_varied(ints(), &[3, 3]).wait().unwrap();
        assert_eq!(all, [ints(), ints()].concat());
        refuse();
        let error = match comm.rank() {
            0 => comm.barrier().wait().unwrap_err(),
            _ => comm.all_gather_varied(ints(), &[3, 3]).wait().unwrap_err(),
        };
        assert!(matches!(error.fault(), Some(Fault::Desync(..))), "{error}");
    });
}

/// A root that gives no vector where one is needed is told so.
#[test]
fn a_root_without_a_vector_is_refused() {
    on_threads(1, |comm| {
        let error = comm.broadcast::<f32>(None, 3, 0).wait().unwrap_err();
        assert!(
            error.to_string().contains("needs an input of 12 bytes on this rank, not 0"),
            "{error}"
        );
        assert!(comm.broadcast::<f32>(None, 0, 0).wait().unwrap().is_empty());
    });
}
