//! Named axes over a communicator.
//!
//! The ranks of a world are laid out as a grid. The last axis runs fastest: in
//! `[("dp", 2), ("tp", 2)]` ranks 0 and 1 differ in `tp`, ranks 0 and 2 in `dp`. Ranks that differ
//! in one axis only form a group of that axis; a rank's coordinate is its rank in that group.
//!
//! ```text
//!           tp 0   tp 1
//!   dp 0      0 ──── 1        the `tp` group of rank 0 is {0, 1}
//!   dp 1      2 ──── 3        the `dp` group of rank 0 is {0, 2}
//! ```

use std::fmt;

use farwire::{Communicator, Error};

/// A grid of ranks; each axis is a communicator.
///
/// ```
/// use farwire_train::Mesh;
///
/// std::thread::scope(|scope| {
///     for comm in farwire::local(4).expect("shared memory") {
///         scope.spawn(move || {
///             let mesh = Mesh::new(&comm, [("dp", 2), ("tp", 2)]).expect("2 × 2 is 4");
///             assert_eq!(comm.rank(), 2 * mesh.coordinate("dp") + mesh.coordinate("tp"));
///         });
///     }
/// });
/// ```
#[derive(Clone, Debug)]
pub struct Mesh {
    world: Communicator,
    axes: Vec<Axis>,
}

#[derive(Clone, Debug)]
struct Axis {
    name: String,
    group: Communicator,
}

/// Why a mesh cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum MeshError {
    /// The grid does not have as many places as there are ranks.
    #[error(
        "{layout} is {product} ranks, but there are {world}; change a size, or start {product} ranks"
    )]
    Size {
        /// The axes and their sizes.
        layout: String,
        /// What they multiply to.
        product: u128,
        /// How many ranks there are.
        world: usize,
    },
    /// An axis of size zero.
    #[error("axis `{0}` has size 0; leave it out, or give it size 1")]
    Empty(String),
    /// Two axes have the same name.
    #[error("axis `{0}` is named twice; give each axis its own name")]
    Twice(String),
    /// A group could not be made.
    #[error(transparent)]
    Split {
        /// Why.
        #[from]
        source: Error,
    },
}

impl Mesh {
    /// Lays the ranks of `world` out as a grid. All ranks must give the same axes in the same
    /// order.
    pub fn new<'a>(
        world: &Communicator,
        axes: impl IntoIterator<Item = (&'a str, usize)>,
    ) -> Result<Self, MeshError> {
        let axes: Vec<(&str, usize)> = axes.into_iter().collect();
        for (index, (name, size)) in axes.iter().enumerate() {
            if *size == 0 {
                return Err(MeshError::Empty((*name).to_owned()));
            }
            if axes[..index].iter().any(|(other, _)| other == name) {
                return Err(MeshError::Twice((*name).to_owned()));
            }
        }
        let product =
            axes.iter().fold(1u128, |product, (_, size)| product.saturating_mul(*size as u128));
        if product != world.size() as u128 {
            let layout: Vec<String> =
                axes.iter().map(|(name, size)| format!("{name}={size}")).collect();
            return Err(MeshError::Size {
                layout: layout.join(" × "),
                product,
                world: world.size(),
            });
        }
        let mut stride = world.size();
        let axes = axes.into_iter().map(|(name, size)| {
            stride /= size;
            let coordinate = world.rank() / stride % size;
            // Ranks of a group share all other coordinates, and so the rank of their first member.
            let first = world.rank() - coordinate * stride;
            let group = world.split(first as u32, coordinate as u32)?;
            Ok(Axis { name: name.to_owned(), group })
        });
        Ok(Self { world: world.clone(), axes: axes.collect::<Result<_, MeshError>>()? })
    }

    /// All ranks.
    pub fn world(&self) -> &Communicator {
        &self.world
    }

    /// The ranks that differ from this one in this axis only, if there is such an axis.
    pub fn axis(&self, name: &str) -> Option<&Communicator> {
        self.axes.iter().find(|axis| axis.name == name).map(|axis| &axis.group)
    }

    /// The same for an axis that is known to exist.
    pub(crate) fn of(&self, name: &str) -> &Communicator {
        self.axis(name).expect("the mesh was made with this axis")
    }

    /// How many ranks an axis has; 1 if there is no such axis.
    pub fn size(&self, name: &str) -> usize {
        self.axis(name).map_or(1, Communicator::size)
    }

    /// This rank's place along an axis; 0 if there is no such axis.
    pub fn coordinate(&self, name: &str) -> usize {
        self.axis(name).map_or(0, Communicator::rank)
    }

    /// The axes' names and groups, in the order given.
    pub fn axes(&self) -> impl Iterator<Item = (&str, &Communicator)> {
        self.axes.iter().map(|axis| (&axis.name[..], &axis.group))
    }
}

/// As `dp=2 × tp=2`.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, group)) in self.axes().enumerate() {
            let sign = if index > 0 { " × " } else { "" };
            write!(f, "{sign}{name}={}", group.size())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwire::ReduceOp;

    fn on_threads(ranks: usize, rank: impl Fn(Communicator) + Sync) {
        let rank = &rank;
        std::thread::scope(|scope| {
            for comm in farwire::local(ranks).unwrap() {
                scope.spawn(move || rank(comm));
            }
        });
    }

    #[test]
    fn every_axis_sums_over_its_own_coordinate_only() {
        on_threads(12, |comm| {
            let mesh = Mesh::new(&comm, [("dp", 2), ("tp", 3), ("pp", 2)]).unwrap();
            let place = [mesh.coordinate("dp"), mesh.coordinate("tp"), mesh.coordinate("pp")];
            assert_eq!(comm.rank(), place[0] * 6 + place[1] * 2 + place[2]);
            for (axis, (name, group)) in mesh.axes().enumerate() {
                let mine: Vec<u32> = place.iter().map(|coordinate| *coordinate as u32).collect();
                let sum = group.all_reduce(mine, ReduceOp::Sum).wait().unwrap();
                for (other, sum) in sum.into_iter().enumerate() {
                    let size = mesh.size(name);
                    let expected =
                        if other == axis { size * (size - 1) / 2 } else { place[other] * size };
                    assert_eq!(sum as usize, expected, "{name} {place:?}");
                }
            }
            assert_eq!(mesh.to_string(), "dp=2 × tp=3 × pp=2");
            assert_eq!(
                (mesh.size("ep"), mesh.coordinate("ep"), mesh.axis("ep").is_none()),
                (1, 0, true)
            );
        });
    }

    #[test]
    fn grids_that_do_not_fit_are_refused_with_what_to_change() {
        let comm = farwire::local(1).unwrap().remove(0);
        for (axes, says) in [
            (vec![("dp", 2), ("tp", 3)], "dp=2 × tp=3 is 6 ranks, but there are 1"),
            (vec![("dp", usize::MAX), ("tp", usize::MAX)], "but there are 1"),
            (vec![("dp", 0)], "leave it out"),
            (vec![("dp", 1), ("dp", 1)], "named twice"),
        ] {
            let error = Mesh::new(&comm, axes).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        assert!(Mesh::new(&comm, []).is_ok());
    }
}
