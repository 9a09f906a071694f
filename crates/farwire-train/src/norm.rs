//! The norm of a gradient that is spread over many ranks.
//!
//! A parameter that is cut along an axis contributes from every rank of that axis. One that is the
//! same on all ranks of an axis must count once. So squares are kept apart by the axes they are cut
//! along, and each kind is added up along just those.

use std::collections::BTreeMap;

use farwire::{Error, ReduceOp};

use crate::mesh::Mesh;

/// Sums of squares, by the axes that the summed elements are cut along.
#[derive(Clone, Debug, Default)]
pub struct Squares {
    sums: BTreeMap<Vec<&'static str>, f64>,
}

impl Squares {
    /// Sums for parameters of these kinds. All ranks must name the same kinds, including those of
    /// which they have no parameter.
    pub fn new(kinds: &[&[&'static str]]) -> Self {
        Self { sums: kinds.iter().map(|kind| (sorted(kind), 0.0)).collect() }
    }

    /// Adds the squares of a parameter that is cut along `axes`.
    ///
    /// # Panics
    ///
    /// If that kind was not named at the start: other ranks would not take part in its sum.
    pub fn add(&mut self, axes: &[&'static str], squares: f64) {
        *self.sums.get_mut(&sorted(axes)).expect("kinds are named at the start") += squares;
    }
}

fn sorted(axes: &[&'static str]) -> Vec<&'static str> {
    let mut axes = axes.to_vec();
    axes.sort_unstable();
    axes
}

/// The square root of the sum of all squares in the mesh, the same bits on every rank.
pub fn global_norm(mesh: &Mesh, mut squares: Squares) -> Result<f64, Error> {
    for (axis, group) in mesh.axes() {
        let cut =
            || squares.sums.iter().filter(|(kind, _)| kind.contains(&axis)).map(|(_, sum)| *sum);
        if group.size() == 1 || cut().next().is_none() {
            continue;
        }
        let totals = group.all_reduce(cut().collect(), ReduceOp::Sum).wait()?;
        let places = squares.sums.iter_mut().filter(|(kind, _)| kind.contains(&axis));
        places.zip(totals).for_each(|((_, sum), total)| *sum = total);
    }
    Ok(squares.sums.values().sum::<f64>().sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_count_once_and_pieces_all() {
        std::thread::scope(|scope| {
            for comm in farwire::local(8).unwrap() {
                scope.spawn(move || {
                    let mesh = Mesh::new(&comm, [("dp", 2), ("tp", 2), ("pp", 2)]).unwrap();
                    let mut squares = Squares::new(&[&["tp", "pp"], &["pp"]]);
                    // Cut along both: 4 pieces of one element each; cut along pp only: 2 pieces,
                    // each on both tp ranks.
                    let cut = (1 + mesh.coordinate("tp") * 2 + mesh.coordinate("pp")) as f64;
                    squares.add(&["pp", "tp"], cut.powi(2));
                    squares.add(&["pp"], (10.0 + mesh.coordinate("pp") as f64).powi(2));
                    let norm = global_norm(&mesh, squares).unwrap();
                    let expected: f64 = 1.0 + 4.0 + 9.0 + 16.0 + 100.0 + 121.0;
                    assert!((norm - expected.sqrt()).abs() < 1e-12, "{norm}");
                });
            }
        });
    }
}
