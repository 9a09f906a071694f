//! Parameters: their first values, and how ranks share them.
//!
//! A cut parameter is described by its *whole*: layers ask for the whole shape and get this rank's
//! share. So one seed, or one file of whole weights, gives the same model for any number of ranks.

use std::collections::BTreeMap;
use std::path::Path;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::group::Group;

/// A parameter of this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// The shape of this rank's share.
    pub shape: Vec<usize>,
    /// How it is cut over the group; `None` if every rank has all of it.
    pub cut: Option<Cut>,
}

impl Param {
    /// Elements of this rank's share.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Numbers in row-major order, with their shape.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Array {
    /// The dimensions.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Vec<f32>,
}

/// Whole tensors by name.
pub type Arrays = BTreeMap<String, Array>;

/// How a parameter is cut: along `dim`, which consists of `blocks` equal blocks. Every rank gets an
/// equal share of each block.
///
/// More than one block is for fused weights: the rows of an attention's query, key and value are
/// three blocks, and each rank gets its heads of all three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The dimension.
    pub dim: usize,
    /// Its blocks.
    pub blocks: usize,
}

impl Cut {
    /// A rank's share of the whole.
    pub fn share(self, whole: &Array, rank: usize, ranks: usize) -> Result<Array, String> {
        let size = whole.shape.get(self.dim).copied().unwrap_or(0);
        let pieces = self.blocks * ranks;
        if size == 0 || !size.is_multiple_of(pieces) {
            let among = if self.blocks == 1 {
                String::new()
            } else {
                format!("{} blocks and ", self.blocks)
            };
            return Err(format!(
                "dimension {} of {:?} cannot be cut evenly among {among}{ranks} ranks; use a multiple of \
                 {pieces}, or fewer ranks",
                self.dim, whole.shape
            ));
        }
        // A row holds what belongs to one index of the dimensions before `dim`. In every block of
        // it, the pieces come rank by rank.
        let row = whole.shape[self.dim..].iter().product::<usize>();
        let mine = whole.data.chunks_exact((row / pieces).max(1)).skip(rank).step_by(ranks);
        let mut shape = whole.shape.clone();
        shape[self.dim] /= ranks;
        Ok(Array { shape, data: mine.flatten().copied().collect() })
    }

    /// The whole, from the shares of all ranks in rank order, each of this shape.
    pub fn join(self, shape: &[usize], shares: &[&[f32]]) -> Array {
        let piece = (shape[self.dim..].iter().product::<usize>() / self.blocks).max(1);
        let pieces = shares.first().map_or(0, |share| share.len() / piece);
        let data = (0..pieces).flat_map(|at| {
            shares.iter().flat_map(move |share| &share[at * piece..(at + 1) * piece])
        });
        let data = data.copied().collect();
        let mut shape = shape.to_vec();
        shape[self.dim] *= shares.len();
        Array { shape, data }
    }
}

/// A parameter's first value, where no weights are given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// Normally distributed with this standard deviation.
    Normal(f64),
}

/// Where a model's first weights come from.
#[derive(Clone, Debug)]
pub enum Start {
    /// Random weights: the same for the same seed and name, whatever else the model has.
    Seed(u64),
    /// Whole weights by name.
    Given(Arrays),
}

impl Start {
    /// This rank's share of the parameter `name`, and how it is cut. `whole` is the shape of the
    /// whole, which a rank alone gets.
    pub fn get(
        &self,
        name: &str,
        whole: &[usize],
        init: Init,
        cut: Option<Cut>,
        group: &Group,
    ) -> Result<(Array, Option<Cut>), String> {
        let made;
        let array = match self {
            Self::Seed(seed) => {
                made = Array { shape: whole.to_vec(), data: initial(*seed, name, whole, init) };
                &made
            }
            Self::Given(arrays) => {
                let array =
                    arrays.get(name).ok_or_else(|| format!("there is no weight `{name}`"))?;
                if array.shape != whole {
                    let found = &array.shape;
                    return Err(format!(
                        "weight `{name}` is {found:?}, but the model needs {whole:?}"
                    ));
                }
                array
            }
        };
        let cut = cut.filter(|_| group.size() > 1);
        let share = match cut {
            Some(cut) => cut
                .share(array, group.rank(), group.size())
                .map_err(|error| format!("`{name}`: {error}"))?,
            None => array.clone(),
        };
        Ok((share, cut))
    }
}

fn initial(seed: u64, name: &str, shape: &[usize], init: Init) -> Vec<f32> {
    let count = shape.iter().product();
    match init {
        Init::Zeros => vec![0.0; count],
        Init::Ones => vec![1.0; count],
        Init::Normal(deviation) => {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&seed.to_le_bytes());
            for (index, byte) in name.bytes().enumerate() {
                let at = 8 + index % 24;
                key[at] = key[at].rotate_left(3) ^ byte;
            }
            let mut rng = ChaCha8Rng::from_seed(key);
            let normal = |rng: &mut ChaCha8Rng| {
                let (radius, angle): (f64, f64) = (rng.random(), rng.random());
                // 1 − radius is never 0.
                (-2.0 * (1.0 - radius).ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
            };
            (0..count).map(|_| (normal(&mut rng) * deviation) as f32).collect()
        }
    }
}

/// Whole tensors from the bytes of a safetensors file.
pub fn read_safetensors(bytes: &[u8]) -> Result<Arrays, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let array = |(name, view): (String, TensorView<'_>)| {
        if view.dtype() != Dtype::F32 {
            return Err(format!("`{name}` is {:?}; convert it to F32", view.dtype()));
        }
        let bytes = view.data().chunks_exact(4);
        let data = bytes.map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        Ok((name, Array { shape: view.shape().to_vec(), data: data.collect() }))
    };
    file.tensors().into_iter().map(array).collect()
}

/// Writes whole tensors to a safetensors file.
pub fn write_safetensors(arrays: &Arrays, path: &Path) -> Result<(), String> {
    let bytes: Vec<(&str, &[usize], Vec<u8>)> = arrays
        .iter()
        .map(|(name, Array { shape, data })| {
            (&name[..], &shape[..], data.iter().flat_map(|x| x.to_le_bytes()).collect())
        })
        .collect();
    let views = bytes
        .iter()
        .map(|(name, shape, bytes)| {
            Ok((*name, TensorView::new(Dtype::F32, shape.to_vec(), bytes)?))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>();
    views
        .and_then(|views| safetensors::serialize_to_file(views, None, path))
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(seed: u64, name: &str, shape: &[usize]) -> Array {
        Array { shape: shape.to_vec(), data: initial(seed, name, shape, Init::Normal(1.0)) }
    }

    #[test]
    fn shares_join_to_the_whole() {
        let whole = random(1, "w", &[12, 6]);
        for (dim, blocks, ranks) in
            [(0, 1, 4), (0, 3, 2), (0, 3, 4), (1, 1, 3), (1, 2, 3), (0, 1, 1)]
        {
            let cut = Cut { dim, blocks };
            let shares: Vec<_> =
                (0..ranks).map(|rank| cut.share(&whole, rank, ranks).unwrap()).collect();
            let data: Vec<&[f32]> = shares.iter().map(|share| &share.data[..]).collect();
            assert_eq!(cut.join(&shares[0].shape, &data), whole);
        }
    }

    /// Against indices, element by element.
    #[test]
    fn a_share_is_the_ranks_part_of_every_block() {
        let whole = random(2, "w", &[4, 12, 5]);
        let (blocks, ranks, rank) = (3, 2, 1);
        let share = Cut { dim: 1, blocks }.share(&whole, rank, ranks).unwrap();
        assert_eq!(share.shape, [4, 6, 5]);
        let each = 12 / blocks / ranks;
        for (index, x) in share.data.iter().enumerate() {
            let (before, at, after) = (index / 30, index / 5 % 6, index % 5);
            let (block, within) = (at / each, at % each);
            let place = (before * 12 + (block * ranks + rank) * each + within) * 5 + after;
            assert_eq!(*x, whole.data[place], "{index}");
        }
    }

    #[test]
    fn uneven_cuts_are_refused_with_what_to_use() {
        let whole = Array { shape: vec![10, 6], data: vec![0.0; 60] };
        let error = Cut { dim: 0, blocks: 1 }.share(&whole, 0, 3).unwrap_err();
        assert!(error.contains("use a multiple of 3, or fewer ranks"), "{error}");
        assert!(Cut { dim: 2, blocks: 1 }.share(&whole, 0, 2).is_err(), "no such dimension");
    }

    #[test]
    fn names_and_seeds_decide_the_start() {
        let of = |seed, name| random(seed, name, &[50]).data;
        assert_eq!(of(1, "a.weight"), of(1, "a.weight"));
        assert_ne!(of(1, "a.weight"), of(1, "b.weight"));
        assert_ne!(of(1, "a.weight"), of(2, "a.weight"));
        let many = initial(3, "x", &[20000], Init::Normal(0.5));
        let mean = many.iter().sum::<f32>() / 20000.0;
        let deviation = (many.iter().map(|x| x * x).sum::<f32>() / 20000.0).sqrt();
        assert!(mean.abs() < 0.02 && (deviation - 0.5).abs() < 0.02, "{mean} {deviation}");
    }

    #[test]
    fn files_of_other_types_are_refused_by_name() {
        let view = TensorView::new(Dtype::F16, vec![2], &[0; 4]).unwrap();
        let bytes = safetensors::serialize([("w", view)], None).unwrap();
        let error = read_safetensors(&bytes).unwrap_err();
        assert!(error.contains("`w` is F16; convert it"), "{error}");
        assert!(read_safetensors(b"not a file of tensors").is_err());
    }
}
