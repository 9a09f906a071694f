//! Training with error feedback ends where dense training does.

use farwire_codec::CODECS;

use crate::Random;
use crate::world::{End, World};

/// A problem whose data are spread over ranks.
trait Problem {
    fn parameters(&self) -> usize;
    fn start(&self) -> Vec<f32>;
    /// The gradient of one rank's part of the mean loss.
    fn gradient(&self, rank: usize, weights: &[f32]) -> Vec<f32>;
    fn loss(&self, weights: &[f32]) -> f64;
}

/// Minimise ‖Xw − y‖² / rows.
struct LeastSquares {
    ranks: usize,
    columns: usize,
    rows: Vec<(Vec<f32>, f32)>,
}

impl LeastSquares {
    fn new(ranks: usize) -> Self {
        let mut random = Random(21);
        let columns = 100;
        let truth = random.normals(columns);
        let rows = (0..800).map(|_| {
            let x = random.normals(columns);
            let y = x.iter().zip(&truth).map(|(x, t)| x * t).sum::<f32>() + 0.1 * random.normal();
            (x, y)
        });
        Self { ranks, columns, rows: rows.collect() }
    }
}

impl Problem for LeastSquares {
    fn parameters(&self) -> usize {
        self.columns
    }

    fn start(&self) -> Vec<f32> {
        vec![0.0; self.columns]
    }

    fn gradient(&self, rank: usize, weights: &[f32]) -> Vec<f32> {
        let mut gradient = vec![0.0; self.columns];
        for (x, y) in self.rows.iter().skip(rank).step_by(self.ranks) {
            let error = x.iter().zip(weights).map(|(x, w)| x * w).sum::<f32>() - y;
            let factor = 2.0 * error / self.rows.len() as f32;
            gradient.iter_mut().zip(x).for_each(|(g, x)| *g += factor * x);
        }
        gradient
    }

    fn loss(&self, weights: &[f32]) -> f64 {
        let squares = self.rows.iter().map(|(x, y)| {
            f64::from(x.iter().zip(weights).map(|(x, w)| x * w).sum::<f32>() - y).powi(2)
        });
        squares.sum::<f64>() / self.rows.len() as f64
    }
}

/// A network with one hidden layer of tanh, which learns the outputs of another one.
struct Mlp {
    ranks: usize,
    rows: Vec<(Vec<f32>, f32)>,
}

const INPUTS: usize = 8;
const HIDDEN: usize = 24;

impl Mlp {
    fn new(ranks: usize) -> Self {
        let mut random = Random(33);
        let teacher = random.normals(HIDDEN * (INPUTS + 1));
        let rows = (0..128).map(|_| {
            let x = random.normals(INPUTS);
            let (_, y) = Self::forward(&x, &teacher);
            (x, y / (HIDDEN as f32).sqrt())
        });
        Self { ranks, rows: rows.collect() }
    }

    /// Hidden units and output. Weights are a row per hidden unit: its inputs, then its output
    /// weight.
    fn forward(x: &[f32], weights: &[f32]) -> (Vec<f32>, f32) {
        let hidden: Vec<f32> = weights
            .chunks(INPUTS + 1)
            .map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum::<f32>().tanh())
            .collect();
        let y = hidden.iter().zip(weights.chunks(INPUTS + 1)).map(|(h, row)| h * row[INPUTS]).sum();
        (hidden, y)
    }
}

impl Problem for Mlp {
    fn parameters(&self) -> usize {
        HIDDEN * (INPUTS + 1)
    }

    fn start(&self) -> Vec<f32> {
        Random(34).normals(self.parameters()).iter().map(|x| x * 0.4).collect()
    }

    fn gradient(&self, rank: usize, weights: &[f32]) -> Vec<f32> {
        let mut gradient = vec![0.0; weights.len()];
        for (x, y) in self.rows.iter().skip(rank).step_by(self.ranks) {
            let (hidden, out) = Self::forward(x, weights);
            let factor = 2.0 * (out - y) / self.rows.len() as f32;
            for ((row, weights), h) in
                gradient.chunks_mut(INPUTS + 1).zip(weights.chunks(INPUTS + 1)).zip(&hidden)
            {
                row[INPUTS] += factor * h;
                let back = factor * weights[INPUTS] * (1.0 - h * h);
                row.iter_mut().zip(x).for_each(|(g, x)| *g += back * x);
            }
        }
        gradient
    }

    fn loss(&self, weights: &[f32]) -> f64 {
        let squares =
            self.rows.iter().map(|(x, y)| f64::from(Self::forward(x, weights).1 - y).powi(2));
        squares.sum::<f64>() / self.rows.len() as f64
    }
}

/// The loss after plain gradient descent with the summed, compressed gradients.
fn train(problem: &impl Problem, mut world: World, ranks: usize, steps: usize, rate: f32) -> f64 {
    let mut weights = problem.start();
    for _ in 0..steps {
        let gradients: Vec<_> = (0..ranks).map(|rank| problem.gradient(rank, &weights)).collect();
        let sum = world.all_reduce(&gradients, End::Commit);
        weights.iter_mut().zip(&sum).for_each(|(w, g)| *w -= rate * g);
    }
    problem.loss(&weights)
}

fn compare(
    name: &str,
    problem: &impl Problem,
    ranks: usize,
    steps: usize,
    rate: f32,
    tolerance: f64,
) {
    let n = problem.parameters();
    let start = problem.loss(&problem.start());
    let dense = train(problem, World::new("none", ranks, n), ranks, steps, rate);
    assert!(dense < 0.1 * start, "{name}: dense training gets from {start} to {dense} only");
    let mut with = f64::NAN;
    // One codec of each family; in the long form, every typical one.
    let forms = if crate::long() { usize::MAX } else { 1 };
    let families = CODECS.iter().flat_map(|family| family.typical.iter().copied().take(forms));
    for codec in families.chain(["powersgd:1"]) {
        let loss = train(problem, World::new(codec, ranks, n), ranks, steps, rate);
        println!(
            "{name}, {ranks} ranks, {codec}: {loss:.6}, dense {dense:.6}, at the start {start:.3}"
        );
        assert!(loss <= dense + tolerance * (start - dense), "{codec}");
        with = if codec == "topk:0.01" { loss } else { with };
    }
    let without =
        train(problem, World::new("topk:0.01", ranks, n).without_feedback(), ranks, steps, rate);
    println!("{name}, {ranks} ranks, topk:0.01 without feedback: {without:.6}");
    assert!(
        without - dense > 2.0 * (with - dense) && without > dense,
        "no worse without feedback: {without}"
    );
}

#[test]
fn least_squares_reaches_the_dense_loss() {
    for ranks in [2, 8] {
        compare("least squares", &LeastSquares::new(ranks), ranks, 2500, 0.002, 0.001);
    }
}

#[test]
fn a_small_network_reaches_the_dense_loss() {
    for ranks in [2, 8] {
        compare("network", &Mlp::new(ranks), ranks, 3000, 0.01, 0.01);
    }
}
