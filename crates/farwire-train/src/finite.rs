//! Gradients that are not finite: which rank has one, and of which parameter.
//!
//! Whether a step can be used shows in its means, which are the same on all ranks, so finding a NaN
//! needs no message. Only when there is one do ranks tell each other, in one small collective,
//! where it came from ([`NotFinite::find`]).

use std::fmt;

use farwire::{Communicator, Error};

/// Why a step's gradients cannot be used, the same on all ranks that looked for it.
#[derive(Clone, Debug, PartialEq)]
pub struct NotFinite {
    /// What is not finite.
    pub cause: Cause,
    /// The rank that has it, in the group that looked for it; of several, the lowest.
    pub rank: usize,
    /// How many other ranks have the same problem.
    pub more: usize,
}

/// What a rank knows to be not finite.
#[derive(Clone, Debug, PartialEq)]
pub enum Cause {
    /// The gradient that this rank has computed.
    Gradient(BadElement),
    /// The mean over replicas, whose own gradients may all be finite: their sum can overflow.
    Mean(BadElement),
    /// The loss, although gradients are finite.
    Loss(f32),
    /// No rank knows.
    Unknown,
}

/// An element of a parameter's gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct BadElement {
    /// The parameter.
    pub parameter: String,
    /// Which element.
    pub index: u64,
    /// NaN, or an infinity.
    pub value: f32,
}

impl NotFinite {
    /// Has the ranks of `group` tell each other what they know. All of them must call this,
    /// including those that know nothing.
    pub fn find(group: &Communicator, mine: Option<&Cause>) -> Result<Self, Error> {
        let all = group.all_gather(encode(mine).to_vec()).wait()?;
        let told: Vec<(usize, Cause)> = (0..)
            .zip(all.chunks_exact(RECORD))
            .filter_map(|(rank, record)| Some((rank, decode(record)?)))
            .collect();
        let first = told.iter().min_by_key(|(rank, cause)| (cause.kind(), *rank));
        let Some((rank, cause)) = first.cloned() else {
            return Ok(Self { cause: Cause::Unknown, rank: group.rank(), more: 0 });
        };
        let alike = told.iter().filter(|(_, other)| other.kind() == cause.kind()).count();
        Ok(Self { cause, rank, more: alike - 1 })
    }
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cause, rank, more } = self;
        match cause {
            Cause::Gradient(BadElement { parameter, index, value }) => {
                write!(
                    f,
                    "the gradient of `{parameter}` on rank {rank} is {value} at element {index}"
                )?;
            }
            Cause::Mean(BadElement { parameter, index, value }) => {
                return write!(
                    f,
                    "the mean gradient of `{parameter}` is {value} at element {index} (seen on rank \
                     {rank}), though each rank's own is finite: their sum overflows"
                );
            }
            Cause::Loss(value) => write!(f, "the loss on rank {rank} is {value}")?,
            Cause::Unknown => return write!(f, "a gradient is not finite, and no rank says which"),
        }
        match more {
            0 => Ok(()),
            1 => write!(f, ", and 1 other rank has the same problem"),
            more => write!(f, ", and {more} other ranks have the same problem"),
        }
    }
}

impl Cause {
    /// Its code in a record. Of several causes, the one with the lowest code is reported; 0 means
    /// none.
    fn kind(&self) -> u8 {
        match self {
            Self::Gradient(_) => 1,
            Self::Mean(_) => 2,
            Self::Loss(_) => 3,
            Self::Unknown => 4,
        }
    }
}

impl BadElement {
    /// The first of `data` that is not finite.
    pub(crate) fn first(parameter: &str, data: &[f32]) -> Option<Self> {
        let index = data.iter().position(|x| !x.is_finite())?;
        Some(Self { parameter: parameter.to_owned(), index: index as u64, value: data[index] })
    }
}

/// Bytes of a rank's record: kind, value, element, and as much of the parameter's name as fits.
const RECORD: usize = 256;
/// Where the name begins in it.
const NAME: usize = 13;

fn encode(cause: Option<&Cause>) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    let Some(cause) = cause else { return record };
    record[0] = cause.kind();
    let (value, index, name) = match cause {
        Cause::Gradient(element) | Cause::Mean(element) => {
            (element.value, element.index, &element.parameter[..])
        }
        Cause::Loss(value) => (*value, 0, ""),
        Cause::Unknown => (f32::NAN, 0, ""),
    };
    record[1..5].copy_from_slice(&value.to_le_bytes());
    record[5..NAME].copy_from_slice(&index.to_le_bytes());
    let room = name.len().min(RECORD - NAME);
    let told = (0..=room).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
    record[NAME..NAME + told].copy_from_slice(&name.as_bytes()[..told]);
    record
}

fn decode(record: &[u8]) -> Option<Cause> {
    let (value, index) = (record[1..5].try_into().ok()?, record[5..NAME].try_into().ok()?);
    let value = f32::from_le_bytes(value);
    let name = record[NAME..].split(|byte| *byte == 0).next().unwrap_or_default();
    let element = || BadElement {
        parameter: String::from_utf8_lossy(name).into_owned(),
        index: u64::from_le_bytes(index),
        value,
    };
    match record[0] {
        0 => None,
        1 => Some(Cause::Gradient(element())),
        2 => Some(Cause::Mean(element())),
        3 => Some(Cause::Loss(value)),
        _ => Some(Cause::Unknown),
    }
}

/// Reads arbitrary bytes as records of other ranks. For fuzzing.
pub(crate) fn read_anything(bytes: &[u8]) {
    for record in bytes.chunks_exact(RECORD) {
        drop(decode(record));
    }
}

/// The bits of the exponent: all set in infinities and NaNs, and in nothing else.
const EXPONENT: u32 = 0x7f80_0000;

/// Adds `x` to `sum`; `false` if any sum is not finite. As fast as adding alone, since both wait
/// for memory.
pub(crate) fn add(sum: &mut [f32], x: &[f32]) -> bool {
    let mut odd = 0;
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += x;
        odd |= u32::from(sum.to_bits() & EXPONENT == EXPONENT);
    }
    odd == 0
}

/// Whether all of `data` is finite. Without a branch per element, so that it is vectorised.
pub(crate) fn is_finite(data: &[f32]) -> bool {
    let odd = |odd: u32, x: &f32| odd | u32::from(x.to_bits() & EXPONENT == EXPONENT);
    data.chunks(4096).all(|chunk| chunk.iter().fold(0, odd) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_finite_is_found_at_any_place() {
        for len in [1usize, 7, 4096, 4097, 10_000] {
            let mut data = vec![f32::MAX; len];
            assert!(is_finite(&data) && add(&mut vec![0.0; len], &data));
            for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, len / 2, len - 1] {
                    data[at] = value;
                    assert!(!is_finite(&data) && !add(&mut vec![0.0; len], &data));
                    assert_eq!(BadElement::first("w", &data).unwrap().index, at as u64);
                    data[at] = -0.0;
                }
            }
            // Finite numbers whose sum is not.
            assert!(len < 2 || !add(&mut vec![f32::MAX; len], &vec![f32::MAX; len]));
        }
        assert!(is_finite(&[]) && is_finite(&[f32::MIN_POSITIVE, 1e-45, -0.0, f32::MIN]));
    }

    #[test]
    fn ranks_agree_on_one_cause_and_a_gradient_goes_before_what_follows_from_it() {
        let long = "wörter.".repeat(100);
        let gradient = |name: &str, value| {
            Cause::Gradient(BadElement { parameter: name.to_owned(), index: 7, value })
        };
        let mean =
            Cause::Mean(BadElement { parameter: "m".to_owned(), index: 1, value: f32::INFINITY });
        let (infinite, long) = (gradient("w", f32::INFINITY), gradient(&long, f32::NEG_INFINITY));
        std::thread::scope(|scope| {
            for comm in farwire::local(3).unwrap() {
                let (mean, infinite, long) = (mean.clone(), infinite.clone(), long.clone());
                scope.spawn(move || {
                    let find = |causes: [Option<&Cause>; 3]| {
                        NotFinite::find(&comm, causes[comm.rank()]).unwrap().to_string()
                    };
                    let loss = Cause::Loss(f32::NAN);
                    let said = find([Some(&mean), Some(&loss), Some(&infinite)]);
                    assert_eq!(said, "the gradient of `w` on rank 2 is inf at element 7");
                    let said = find([None, Some(&loss), Some(&loss)]);
                    assert_eq!(
                        said,
                        "the loss on rank 1 is NaN, and 1 other rank has the same problem"
                    );
                    assert!(find([None, Some(&mean), None]).contains("of `m` is inf at element 1"));
                    assert!(find([None; 3]).contains("no rank says which"));
                    // A name too long for the record is cut, at a whole letter.
                    let said = find([Some(&long), None, None]);
                    assert!(said.starts_with("the gradient of `wörter.wö") && !said.contains('�'));
                });
            }
        });
    }

    #[test]
    fn records_that_no_rank_writes_are_harmless() {
        for kind in 0..=255 {
            let mut record = [0xff; RECORD];
            record[0] = kind;
            assert_eq!(decode(&record).is_none(), kind == 0);
        }
    }
}
