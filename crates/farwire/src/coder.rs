//! What codecs do to vectors, away from the driver's lock: long ones on a thread of their own, short ones wherever one waits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::Duration;

use farwire_codec::collective::{CodedCollective, Finished, Floats, Nonsense};
use farwire_codec::{DecodeError, Transaction};
use farwire_proto::{DType, OpId};
use half::{bf16, f16};

use crate::driver::Coding;
use crate::error::Error;
use crate::memory::Buffer;
use crate::node::Node;
use crate::pending::Completion;

/// Vectors of up to this many elements are coded in less time than it takes to wake a thread.
pub(crate) const SHORT: usize = 1 << 15;

/// How often the thread looks whether its node is still there.
const LOOK: Duration = Duration::from_millis(500);

/// What a call without a codec takes along of what calls through one have left out.
#[derive(Debug)]
pub(crate) struct Debt {
    /// Owes nothing any more, once it is committed.
    pub(crate) paid: Transaction,
    /// What the caller gave, without the debt.
    pub(crate) input: Buffer,
}

impl Debt {
    /// The call has ended. A result that is not finite will not be used, so what is owed is still owed
    /// then. All ranks have the same result and decide alike; after a reduce-scatter each knows of its own
    /// block only, and one that sees no NaN has paid.
    pub(crate) fn settle(self, result: Result<Buffer, Error>) -> Result<Buffer, Error> {
        match result {
            Ok(result) => {
                if is_finite(&result) {
                    self.paid.commit();
                }
                Ok(result)
            }
            Err(mut error) => {
                error.put_input(self.input);
                Err(error)
            }
        }
    }
}

fn is_finite(buffer: &Buffer) -> bool {
    fn all<T: bytemuck::AnyBitPattern>(buffer: &Buffer, finite: impl Fn(&T) -> bool) -> bool {
        bytemuck::cast_slice::<u8, T>(buffer.bytes()).iter().all(finite)
    }
    match buffer.dtype() {
        DType::F32 => all(buffer, |x: &f32| x.is_finite()),
        DType::F64 => all(buffer, |x: &f64| x.is_finite()),
        DType::F16 => all(buffer, |x: &f16| x.is_finite()),
        DType::Bf16 => all(buffer, |x: &bf16| x.is_finite()),
        _ => true,
    }
}

/// Starts the thread, if it does not run yet.
pub(crate) fn ensure(node: &Node, weak: Weak<Node>) -> std::io::Result<()> {
    let mut driver = node.driver();
    if !driver.has_coder() {
        let (tell, told) = mpsc::channel();
        std::thread::Builder::new().name("farwire-codec".into()).spawn(move || run(&told, &weak))?;
        driver.set_coder(tell);
    }
    Ok(())
}

fn run(told: &Receiver<OpId>, node: &Weak<Node>) {
    loop {
        match told.recv_timeout(LOOK) {
            Err(RecvTimeoutError::Timeout) if node.strong_count() > 0 => {}
            Err(_) => return,
            Ok(op) => {
                let Some(node) = node.upgrade() else { return };
                work(&node, op);
                node.driver().coded();
                node.nudge(); // an operation may have ended, well or badly, while its caller sleeps
            }
        }
    }
}

/// Codes for short operations, the first of which is given, until none wants it; `true` if there was one.
pub(crate) fn work_short(node: &Node, first: Option<OpId>) -> bool {
    let mut next = first;
    while let Some(op) = next {
        work(node, op);
        next = node.driver().take_short();
    }
    first.is_some()
}

fn work(node: &Node, op: OpId) {
    // Its lock is free again before the work begins.
    let coding = node.driver().take_coding(op);
    match coding {
        None => {}
        Some(Coding::Finish { exchange, completion }) => finish(node, *exchange, &completion),
        Some(Coding::Go { mut exchange, came, alone }) => {
            let me = exchange.rank();
            // A bug must not leave the other ranks waiting; and this thread is needed by other operations.
            let worked = catch_unwind(AssertUnwindSafe(|| go(node, op, &mut exchange, &came, alone)));
            let bug = || Err(Nonsense { from: me, round: 0, why: DecodeError::Field("panic") });
            let nonsense = worked.unwrap_or_else(|_| bug()).err();
            node.driver().give_coding_back(op, exchange, nonsense);
        }
    }
}

fn go(
    node: &Node,
    op: OpId,
    exchange: &mut CodedCollective,
    came: &[(u32, Vec<Vec<u8>>)],
    alone: bool,
) -> Result<(), Nonsense> {
    // What others sent may be here before this rank has made its own part, which comes first.
    make(node, op, exchange, alone)?;
    for (round, parcels) in came {
        exchange.came(*round, parcels)?;
        make(node, op, exchange, alone)?;
    }
    Ok(())
}

/// Makes and supplies all parcels that can be made.
fn make(node: &Node, op: OpId, exchange: &mut CodedCollective, alone: bool) -> Result<(), Nonsense> {
    while let Some(made) = exchange.next_parcels() {
        let round = exchange.made() - 1;
        if alone {
            exchange.came(round, &[Vec::new()])?;
        } else {
            node.driver().supply(op, round, &made);
        }
    }
    Ok(())
}

fn finish(node: &Node, exchange: CodedCollective, completion: &Arc<Completion>) {
    let result = match exchange.finish() {
        Err((error, input)) => Err(Error::NotEncodable { error, input: Some(Box::new(input.into())) }),
        Ok(Finished { output, input }) => {
            let in_type = match &input {
                Floats::F32(_) => None,
                Floats::F64(_) => Some(Floats::F64(output.iter().map(|x| f64::from(*x)).collect())),
                Floats::F16(_) => Some(Floats::F16(output.iter().map(|x| f16::from_f32(*x)).collect())),
                Floats::Bf16(_) => Some(Floats::Bf16(output.iter().map(|x| bf16::from_f32(*x)).collect())),
            };
            let mut driver = node.driver();
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
