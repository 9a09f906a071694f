//! Parameters: named, in the order they were made, whole or cut over a group.
//!
//! A cut parameter is described by its *whole*: layers ask for the whole shape and get this rank's share. So one seed, or one file of unsharded weights, gives the
//! same model for any number of ranks.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{Device, Error, Result, Tensor, Var};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::collective::Group;

/// How a parameter is cut: along `dim`, which is `blocks` equal blocks, of each of which every rank gets an equal share.
///
/// More than one block is for fused weights: the rows of an attention's query, key and value are three blocks, and each rank gets its heads of all three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The dimension.
    pub dim: usize,
    /// Its blocks.
    pub blocks: usize,
}

impl Cut {
    /// A rank's share of the whole.
    pub fn share(self, whole: &Tensor, rank: usize, ranks: usize) -> Result<Tensor> {
        let each = self.each(whole.dims(), ranks)?;
        let shares: Vec<Tensor> = (0..self.blocks)
            .map(|block| whole.narrow(self.dim, (block * ranks + rank) * each, each))
            .collect::<Result<_>>()?;
        Tensor::cat(&shares, self.dim)?.contiguous()
    }

    /// The whole, from everyone's share in rank order.
    pub fn join(self, shares: &[Tensor]) -> Result<Tensor> {
        let first = shares.first().ok_or_else(|| Error::msg("no shares to join"))?;
        let each = first.dim(self.dim)? / self.blocks;
        let pieces: Vec<Tensor> = (0..self.blocks)
            .flat_map(|block| shares.iter().map(move |share| share.narrow(self.dim, block * each, each)))
            .collect::<Result<_>>()?;
        Tensor::cat(&pieces, self.dim)?.contiguous()
    }

    /// Elements along the dimension that a rank has of each block.
    fn each(self, whole: &[usize], ranks: usize) -> Result<usize> {
        let size = whole.get(self.dim).copied().unwrap_or(0);
        if size == 0 || !size.is_multiple_of(self.blocks * ranks) {
            let among = if self.blocks == 1 { String::new() } else { format!("{} blocks and ", self.blocks) };
            return Err(Error::msg(format!(
                "dimension {} of {whole:?} cannot be cut evenly among {among}{ranks} ranks; use a multiple of {}, or fewer ranks",
                self.dim,
                self.blocks * ranks
            )));
        }
        Ok(size / self.blocks / ranks)
    }
}

/// What a parameter starts as, where no weights are given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// Normally distributed with this standard deviation.
    Normal(f64),
}

/// A parameter.
#[derive(Clone, Debug)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// This rank's share of it.
    pub var: Var,
    /// How it is cut over the group; none if every rank has all of it.
    pub cut: Option<Cut>,
}

/// Makes parameters, and remembers them.
#[derive(Clone, Debug)]
pub struct Params {
    weights: Weights,
    group: Group,
    list: Vec<Param>,
}

#[derive(Clone, Debug)]
enum Weights {
    Seed(u64),
    Given(HashMap<String, Tensor>),
}

impl Params {
    /// Random parameters, the same for any group.
    pub fn from_seed(seed: u64, group: &Group) -> Self {
        Self { weights: Weights::Seed(seed), group: group.clone(), list: Vec::new() }
    }

    /// Parameters from whole tensors.
    pub fn from_tensors(tensors: impl IntoIterator<Item = (String, Tensor)>, group: &Group) -> Self {
        Self {
            weights: Weights::Given(tensors.into_iter().collect()),
            group: group.clone(),
            list: Vec::new(),
        }
    }

    /// Parameters from a safetensors file of whole tensors.
    pub fn from_file(path: impl AsRef<Path>, group: &Group) -> Result<Self> {
        Ok(Self::from_tensors(candle_core::safetensors::load(path, &Device::Cpu)?, group))
    }

    /// The ranks that share cut parameters.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// A parameter whose whole has this shape.
    pub fn get(&mut self, name: &str, whole: &[usize], init: Init, cut: Option<Cut>) -> Result<Tensor> {
        let tensor = match &self.weights {
            Weights::Seed(seed) => initial(*seed, name, whole, init)?,
            Weights::Given(tensors) => {
                let tensor = tensors.get(name);
                let tensor = tensor.ok_or_else(|| Error::msg(format!("there is no weight `{name}`")))?;
                if tensor.dims() != whole {
                    let found = tensor.dims();
                    return Err(Error::msg(format!(
                        "weight `{name}` is {found:?}, but the model needs {whole:?}"
                    )));
                }
                tensor.clone()
            }
        };
        let cut = cut.filter(|_| self.group.size() > 1);
        let share = match cut {
            Some(cut) => cut.share(&tensor, self.group.rank(), self.group.size()),
            None => Ok(tensor),
        };
        let share = share.map_err(|error| Error::msg(format!("`{name}`: {error}")))?;
        let var = Var::from_tensor(&share)?;
        let tensor = var.as_tensor().clone();
        self.list.push(Param { name: name.to_owned(), var, cut });
        Ok(tensor)
    }

    /// The parameters made since this was last called.
    pub fn take(&mut self) -> Vec<Param> {
        std::mem::take(&mut self.list)
    }
}

/// The whole tensors of parameters that a group holds shares of: on its rank 0, none on the others.
pub(crate) fn join_shares(
    shares: &[(&Param, Vec<f32>)],
    group: &Group,
) -> std::result::Result<BTreeMap<String, Tensor>, crate::TrainError> {
    let mut wholes = BTreeMap::new();
    for (param, share) in shares {
        let tensor = |data: &[f32]| Tensor::from_slice(data, param.var.shape(), &Device::Cpu);
        let whole = match (param.cut, group.communicator()) {
            (Some(cut), Some(comm)) => match comm.gather(share.clone(), 0).wait()? {
                Some(all) => {
                    let shares: Vec<Tensor> = all.chunks(share.len()).map(tensor).collect::<Result<_>>()?;
                    Some(cut.join(&shares)?)
                }
                None => None,
            },
            _ => (group.rank() == 0).then(|| tensor(share)).transpose()?,
        };
        wholes.extend(whole.map(|whole| (param.name.clone(), whole)));
    }
    Ok(wholes)
}

/// The same numbers for the same seed and name, whatever else the model has.
fn initial(seed: u64, name: &str, shape: &[usize], init: Init) -> Result<Tensor> {
    let count = shape.iter().product();
    let data = match init {
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
    };
    Tensor::from_vec(data, shape, &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_join_to_the_whole() {
        let whole = initial(1, "w", &[12, 6], Init::Normal(1.0)).unwrap();
        for (dim, blocks, ranks) in [(0, 1, 4), (0, 3, 2), (0, 3, 4), (1, 1, 3), (1, 2, 3), (0, 1, 1)] {
            let cut = Cut { dim, blocks };
            let shares: Vec<_> = (0..ranks).map(|rank| cut.share(&whole, rank, ranks).unwrap()).collect();
            let joined = cut.join(&shares).unwrap();
            assert_eq!(joined.to_vec2::<f32>().unwrap(), whole.to_vec2::<f32>().unwrap());
        }
    }

    #[test]
    fn uneven_cuts_are_refused_with_what_to_use() {
        let whole = Tensor::zeros((10, 6), candle_core::DType::F32, &Device::Cpu).unwrap();
        let error = Cut { dim: 0, blocks: 1 }.share(&whole, 0, 3).unwrap_err().to_string();
        assert!(error.contains("use a multiple of 3, or fewer ranks"), "{error}");
    }

    #[test]
    fn names_and_seeds_decide_the_start() {
        let of =
            |seed, name| initial(seed, name, &[50], Init::Normal(0.5)).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(of(1, "a.weight"), of(1, "a.weight"));
        assert_ne!(of(1, "a.weight"), of(1, "b.weight"));
        assert_ne!(of(1, "a.weight"), of(2, "a.weight"));
        let many = initial(3, "x", &[20000], Init::Normal(0.5)).unwrap().to_vec1::<f32>().unwrap();
        let mean = many.iter().sum::<f32>() / 20000.0;
        let deviation = (many.iter().map(|x| x * x).sum::<f32>() / 20000.0).sqrt();
        assert!(mean.abs() < 0.02 && (deviation - 0.5).abs() < 0.02, "{mean} {deviation}");
    }
}
