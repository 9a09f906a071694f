//! `farwire bench all_reduce --device cuda`: vectors on a card.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::cast_vec as same;
use farwire::{Communicator, Compressor, DType, Element, Error, ReduceOp};
use farwire_cuda::{Device, DeviceCommunicator, TensorElement};
use half::{bf16, f16};

use super::BenchError;
use crate::device::card_of;

/// A rank's card.
#[derive(Debug)]
pub(super) struct OnCard(DeviceCommunicator);

impl OnCard {
    pub(super) fn new(comm: &Communicator) -> Result<Self, BenchError> {
        let device = Device::new(card_of(comm)?)?;
        Ok(Self(DeviceCommunicator::new(comm, &device)))
    }

    /// The result, and how long it took from an idle card to an idle card.
    pub(super) fn all_reduce<T: Element>(
        &self,
        data: Vec<T>,
        op: ReduceOp,
        compressor: Option<&Compressor>,
    ) -> Result<(Vec<T>, Duration), Error> {
        Ok(match T::DTYPE {
            DType::F32 => {
                let (result, took) = self.of::<f32>(same(data), op, compressor)?;
                (same(result), took)
            }
            DType::F16 => {
                let (result, took) = self.of::<f16>(same(data), op, compressor)?;
                (same(result), took)
            }
            DType::Bf16 => {
                let (result, took) = self.of::<bf16>(same(data), op, compressor)?;
                (same(result), took)
            }
            _ => unreachable!("other types are refused"),
        })
    }

    fn of<T: Element + TensorElement>(
        &self,
        data: Vec<T>,
        op: ReduceOp,
        compressor: Option<&Compressor>,
    ) -> Result<(Vec<T>, Duration), Error> {
        let Self(comm) = self;
        let wrong = |error| Error::System {
            what: "could not use the card",
            error: std::io::Error::other(error),
        };
        let tensor = Arc::new(comm.device().upload(&data).map_err(wrong)?);
        // Ranks take different times to copy their vectors to the card.
        comm.host().barrier().wait()?;
        let start = Instant::now();
        match compressor {
            Some(compressor) => comm.all_reduce_compressed("bench", &tensor, op, compressor),
            None => comm.all_reduce(&tensor, op),
        }
        .wait()?;
        comm.device().synchronize().map_err(wrong)?;
        let took = start.elapsed();
        Ok((tensor.download().map_err(wrong)?, took))
    }
}
