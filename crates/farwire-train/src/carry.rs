//! Sends named tensors and files between ranks.

use std::collections::BTreeMap;
use std::fmt::Display;

use farwire::Communicator;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::param::{Array, Arrays};

/// Differs from the tags of a pipeline's micro-batches.
const TAG: u32 = u32::MAX;

/// Names and shapes of tensors, sent ahead of the tensors.
#[derive(Serialize, Deserialize)]
struct Header(Vec<(String, Vec<usize>)>);

impl Header {
    fn of(arrays: &Arrays) -> Result<Vec<u8>, TrainError> {
        Self(arrays.iter().map(|(name, array)| (name.clone(), array.shape.clone())).collect())
            .bytes()
    }

    fn bytes(&self) -> Result<Vec<u8>, TrainError> {
        serde_json::to_vec(self).map_err(|error| TrainError::Settings(error.to_string()))
    }

    fn parse(bytes: &[u8]) -> Result<Self, TrainError> {
        serde_json::from_slice(bytes).map_err(|error| TrainError::Settings(error.to_string()))
    }
}

/// The number of elements of a tensor that a peer has announced.
fn elements(name: &str, shape: &[usize]) -> Result<usize, TrainError> {
    let elements = shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
    elements.ok_or_else(|| TrainError::Settings(format!("`{name}` is too large: {shape:?}")))
}

/// Reads arbitrary bytes as a header. For fuzzing.
pub(crate) fn read_anything(bytes: &[u8]) {
    if let Ok(Header(header)) = Header::parse(bytes) {
        header.iter().for_each(|(name, shape)| drop(elements(name, shape)));
    }
}

/// Tells all ranks whether rank 0 has failed. If it has, all get its error; otherwise each keeps
/// its own result.
pub fn tell<T, E>(comm: &Communicator, mine: Result<T, E>) -> Result<T, E>
where
    E: Display + From<TrainError>,
{
    let told = mine.as_ref().err().map(E::to_string).unwrap_or_default();
    let told = broadcast_bytes(comm, (comm.rank() == 0).then(|| told.into_bytes()))?;
    if comm.rank() > 0 && !told.is_empty() {
        return Err(TrainError::Told(String::from_utf8_lossy(&told).into_owned()).into());
    }
    mine
}

/// Sends named tensors to a rank that [`receive`]s them.
pub(crate) fn send(comm: &Communicator, to: usize, arrays: Arrays) -> Result<(), TrainError> {
    send_bytes(comm, to, Header::of(&arrays)?)?;
    for array in arrays.into_values() {
        comm.send(array.data, to, TAG).wait()?;
    }
    Ok(())
}

pub(crate) fn receive(comm: &Communicator, from: usize) -> Result<Arrays, TrainError> {
    let Header(header) = Header::parse(&receive_bytes(comm, from)?)?;
    let arrays = header.into_iter().map(|(name, shape)| {
        let data = comm.recv::<f32>(elements(&name, &shape)?, from, TAG).wait()?;
        Ok((name, Array { shape, data }))
    });
    arrays.collect()
}

/// Sends rank 0's tensors to every rank, one at a time.
pub(crate) fn broadcast(
    comm: &Communicator,
    arrays: Option<Arrays>,
    mut take: impl FnMut(&str, Array) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let mut arrays = arrays.unwrap_or_default();
    let header = if comm.rank() == 0 { Some(Header::of(&arrays)?) } else { None };
    let Header(header) = Header::parse(&broadcast_bytes(comm, header)?)?;
    for (name, shape) in header {
        let mine = arrays.remove(&name).map(|array| array.data);
        let data = comm.broadcast(mine, elements(&name, &shape)?, 0).wait()?;
        take(&name, Array { shape, data })?;
    }
    Ok(())
}

/// Shapes of tensors by name.
pub(crate) type Shapes = BTreeMap<String, Vec<usize>>;

/// The shapes of all ranks together, on rank 0; `None` elsewhere.
pub(crate) fn gather_shapes(
    comm: &Communicator,
    mine: Shapes,
) -> Result<Option<Shapes>, TrainError> {
    let all = gather(comm, Header(mine.into_iter().collect()).bytes()?)?;
    let Some(all) = all else { return Ok(None) };
    let mut shapes = Shapes::new();
    for theirs in all {
        shapes.extend(Header::parse(&theirs)?.0);
    }
    Ok(Some(shapes))
}

/// Every rank's bytes, in rank order, on rank 0; `None` elsewhere.
pub(crate) fn gather(
    comm: &Communicator,
    mine: Vec<u8>,
) -> Result<Option<Vec<Vec<u8>>>, TrainError> {
    if comm.rank() > 0 {
        return send_bytes(comm, 0, mine).map(|()| None);
    }
    let others = (1..comm.size()).map(|from| receive_bytes(comm, from));
    std::iter::once(Ok(mine)).chain(others).collect::<Result<_, _>>().map(Some)
}

/// Gives each rank its entry of `all`, which rank 0 has in rank order.
pub(crate) fn scatter(
    comm: &Communicator,
    all: Option<Vec<Vec<u8>>>,
) -> Result<Vec<u8>, TrainError> {
    if comm.rank() > 0 {
        return receive_bytes(comm, 0);
    }
    let mut all = all.unwrap_or_else(|| vec![Vec::new(); comm.size()]).into_iter();
    let mine = all.next().unwrap_or_default();
    (1..).zip(all).try_for_each(|(to, bytes)| send_bytes(comm, to, bytes))?;
    Ok(mine)
}

pub(crate) fn broadcast_bytes(
    comm: &Communicator,
    bytes: Option<Vec<u8>>,
) -> Result<Vec<u8>, TrainError> {
    let length = bytes.as_ref().map(|bytes| vec![bytes.len() as u64]);
    let length = comm.broadcast(length, 1, 0).wait()?[0] as usize;
    Ok(comm.broadcast(bytes, length, 0).wait()?)
}

pub(crate) fn send_bytes(comm: &Communicator, to: usize, bytes: Vec<u8>) -> Result<(), TrainError> {
    comm.send(vec![bytes.len() as u64], to, TAG).wait()?;
    Ok(comm.send(bytes, to, TAG).wait()?)
}

pub(crate) fn receive_bytes(comm: &Communicator, from: usize) -> Result<Vec<u8>, TrainError> {
    let length = comm.recv::<u64>(1, from, TAG).wait()?[0];
    Ok(comm.recv::<u8>(length as usize, from, TAG).wait()?)
}
