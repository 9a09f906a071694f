//! Encoding and decoding, away from the driver's lock: long vectors on a thread of their own, short
//! ones on whichever thread waits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use farwire_codec::collective::{CodedCollective, Finished, Floats};
use farwire_proto::{Coding, Nonsense, OpId};
use half::{bf16, f16};

use crate::completion::Completion;
use crate::driver::SharedDriver;
use crate::error::Error;

/// Vectors of up to this many elements are coded in less time than it takes to wake a thread.
pub(crate) const SHORT: usize = 1 << 15;

/// Does the coding of short operations, beginning with `first`, until none has any to do; `true` if
/// there was a first.
pub(crate) fn work_short(driver: &SharedDriver, first: Option<OpId>) -> bool {
    let mut next = first;
    while let Some(op) = next {
        work(driver, op);
        next = driver.lock().take_short();
    }
    first.is_some()
}

/// Does the coding that an operation has asked for.
pub(crate) fn work(driver: &SharedDriver, op: OpId) {
    // The driver's lock is released before the work begins.
    let coding = driver.lock().take_coding(op);
    match coding {
        None => {}
        Some(Coding::Finish { rounds, tag }) => finish(driver, *rounds, &tag.completion),
        Some(Coding::Work(mut work)) => {
            // A panic must not leave the other ranks waiting, and other operations need this
            // thread.
            let worked = catch_unwind(AssertUnwindSafe(|| {
                work.run(|round, made| driver.lock().supply(op, round, made))
            }));
            let me = work.rounds.rank();
            let bug = || Err(Nonsense { from: me, round: 0, why: "its codec panicked".into() });
            let nonsense = worked.unwrap_or_else(|_| bug()).err();
            driver.lock().give_coding_back(op, work.rounds, nonsense);
        }
    }
}

fn finish(driver: &SharedDriver, exchange: CodedCollective, completion: &Arc<Completion>) {
    let result = match exchange.finish() {
        Err((error, input)) => {
            Err(Error::NotEncodable { error, input: Some(Box::new(input.into())) })
        }
        Ok(Finished { output, input }) => {
            let in_type = match &input {
                Floats::F32(_) => None,
                Floats::F64(_) => Some(Floats::F64(output.iter().map(|x| f64::from(*x)).collect())),
                Floats::F16(_) => {
                    Some(Floats::F16(output.iter().map(|x| f16::from_f32(*x)).collect()))
                }
                Floats::Bf16(_) => {
                    Some(Floats::Bf16(output.iter().map(|x| bf16::from_f32(*x)).collect()))
                }
            };
            let mut driver = driver.lock();
            driver.recycle(input.into());
            match in_type {
                None => Ok(output.into()),
                Some(result) => {
                    driver.recycle(output.into());
                    Ok(result.into())
                }
            }
        }
    };
    if let Some(waker) = completion.complete(result) {
        waker.wake();
    }
}
