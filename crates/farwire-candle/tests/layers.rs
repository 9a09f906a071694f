//! Parallel layers against whole ones: outputs and all gradients.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::collections::BTreeMap;

use candle_core::{Device, Result, Tensor, Var};
use farwire_candle::{ColumnParallelLinear, ParallelEmbedding, Param, Params, RowParallelLinear};
use farwire_train::{Group, Init};

const WORLDS: [usize; 3] = [2, 3, 4];
const TOLERANCE: f32 = 1e-5;

/// What a layer computes forward and backward, as whole tensors.
struct Outcome {
    y: Vec<f32>,
    dx: Vec<f32>,
    /// By parameter name.
    gradients: BTreeMap<String, Vec<f32>>,
}

fn vec(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn random(seed: u64, shape: &[usize]) -> Tensor {
    let mut params = Params::from_seed(seed, &Group::alone());
    params.get("x", shape, Init::Normal(1.0), None).unwrap().detach()
}

/// Weights that are nowhere zero, so that a bias added twice, or not at all, shows.
fn weights(shapes: &[(&str, &[usize])]) -> Vec<(String, Tensor)> {
    let tensor = |(index, (name, shape)): (usize, &(&str, &[usize]))| {
        ((*name).to_owned(), random(100 + index as u64, shape))
    };
    shapes.iter().enumerate().map(tensor).collect()
}

/// Forward, and backward from a fixed gradient of y.
fn outcome(params: &[Param], x: &Var, y: &Tensor, dy: &Tensor, group: &Group) -> Outcome {
    let gradients = (y * dy).unwrap().sum_all().unwrap().backward().unwrap();
    let gathered = params.iter().map(|param| {
        let gradient = gradients.get(&param.var);
        let gradient = gradient.unwrap_or_else(|| panic!("{} has a gradient", param.name));
        let whole = match (param.cut, group.communicator()) {
            (Some(cut), Some(comm)) => {
                let all = comm.all_gather(vec(gradient)).wait().unwrap();
                let shares: Vec<&[f32]> = all.chunks(gradient.elem_count()).collect();
                cut.join(gradient.dims(), &shares).data
            }
            _ => vec(gradient),
        };
        (param.name.clone(), whole)
    });
    let gathered = gathered.collect();
    Outcome { y: vec(y), dx: vec(gradients.get(x).unwrap()), gradients: gathered }
}

fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(
            (got - expected).abs() <= TOLERANCE * expected.abs().max(1.0),
            "{what}[{index}]: {got}, not {expected}"
        );
    }
}

fn assert_same(what: &str, got: &Outcome, expected: &Outcome) {
    assert_close(&format!("{what}: y"), &got.y, &expected.y);
    assert_close(&format!("{what}: dx"), &got.dx, &expected.dx);
    assert_eq!(
        got.gradients.keys().collect::<Vec<_>>(),
        expected.gradients.keys().collect::<Vec<_>>()
    );
    for (name, gradient) in &got.gradients {
        assert_close(&format!("{what}: d{name}"), gradient, &expected.gradients[name]);
    }
}

fn on_threads(ranks: usize, rank: impl Fn(Group) + Sync) {
    let rank = &rank;
    std::thread::scope(|scope| {
        for comm in farwire::local(ranks).unwrap() {
            scope.spawn(move || rank(Group::of(&comm)));
        }
    });
}

/// `x·Wᵀ + b` in plain candle.
fn dense(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    x.matmul(&weight.t()?)?.broadcast_add(bias)
}

const SHAPES: [(&str, &[usize]); 4] = [
    ("up.weight", &[24, 10]),
    ("up.bias", &[24]),
    ("down.weight", &[10, 24]),
    ("down.bias", &[10]),
];

#[test]
fn column_parallel_is_dense() {
    let (x, dy) = (random(1, &[7, 10]), random(2, &[7, 24]));
    let whole = weights(&SHAPES[..2]);
    let vars: Vec<Param> = whole
        .iter()
        .map(|(name, tensor)| Param {
            name: name.clone(),
            var: Var::from_tensor(tensor).unwrap(),
            cut: None,
        })
        .collect();
    let input = Var::from_tensor(&x).unwrap();
    let y = dense(&input, &vars[0].var, &vars[1].var).unwrap();
    let expected = outcome(&vars, &input, &y, &dy, &Group::alone());
    for ranks in WORLDS {
        on_threads(ranks, |group| {
            let mut params = Params::from_tensors(whole.clone(), &group).unwrap();
            let layer = ColumnParallelLinear::new(&mut params, "up", 10, 24).unwrap();
            let input = Var::from_tensor(&x).unwrap();
            // Each rank has its columns of y, and of the gradient.
            let y = layer.forward(&input).unwrap();
            assert_eq!(y.dims(), [7, 24 / ranks]);
            let width = 24 / ranks;
            let share = dy.narrow(1, group.rank() * width, width).unwrap();
            let cut = outcome(&params.clone().take(), &input, &y, &share, &group);
            let columns = vec(&Tensor::from_slice(&expected.y, (7, 24), &Device::Cpu)
                .unwrap()
                .narrow(1, group.rank() * width, width)
                .unwrap());
            assert_same(
                &format!("cut, {ranks} ranks"),
                &cut,
                &Outcome {
                    y: columns,
                    dx: expected.dx.clone(),
                    gradients: expected.gradients.clone(),
                },
            );
            // All columns on every rank.
            let y = layer.gathered().forward(&input).unwrap();
            let gathered = outcome(&params.take(), &input, &y, &dy, &group);
            assert_same(&format!("gathered, {ranks} ranks"), &gathered, &expected);
        });
    }
}

#[test]
fn row_parallel_is_dense() {
    let (x, dy) = (random(3, &[7, 24]), random(4, &[7, 10]));
    let whole = weights(&SHAPES[2..]);
    let vars: Vec<Param> = whole
        .iter()
        .map(|(name, tensor)| Param {
            name: name.clone(),
            var: Var::from_tensor(tensor).unwrap(),
            cut: None,
        })
        .collect();
    let input = Var::from_tensor(&x).unwrap();
    let y = dense(&input, &vars[0].var, &vars[1].var).unwrap();
    let expected = outcome(&vars, &input, &y, &dy, &Group::alone());
    for ranks in WORLDS {
        on_threads(ranks, |group| {
            let mut params = Params::from_tensors(whole.clone(), &group).unwrap();
            let layer = RowParallelLinear::new(&mut params, "down", 24, 10).unwrap();
            let width = 24 / ranks;
            let columns = |tensor: &Tensor| {
                tensor.narrow(1, group.rank() * width, width).unwrap().contiguous().unwrap()
            };
            let input = Var::from_tensor(&columns(&x)).unwrap();
            let y = layer.forward(&input).unwrap();
            let got = outcome(&params.take(), &input, &y, &dy, &group);
            let dx =
                vec(&columns(&Tensor::from_slice(&expected.dx, (7, 24), &Device::Cpu).unwrap()));
            let expected =
                Outcome { y: expected.y.clone(), dx, gradients: expected.gradients.clone() };
            assert_same(&format!("{ranks} ranks"), &got, &expected);
            // The bias is the same on every rank, so its gradient must be too, to the bit.
            let comm = group.communicator().unwrap();
            assert!(
                comm.is_in_sync(&got.gradients["down.bias"]).unwrap()
                    && comm.is_in_sync(&got.y).unwrap()
            );
        });
    }
}

/// The pair with a function in between, on input of three dimensions.
#[test]
fn a_column_and_row_pair_is_a_dense_mlp() {
    let (x, dy) = (random(5, &[2, 5, 10]), random(6, &[2, 5, 10]));
    let whole = weights(&SHAPES);
    let run = |group: &Group| {
        let mut params = Params::from_tensors(whole.clone(), group).unwrap();
        let up = ColumnParallelLinear::new(&mut params, "up", 10, 24).unwrap();
        let down = RowParallelLinear::new(&mut params, "down", 24, 10).unwrap();
        let input = Var::from_tensor(&x).unwrap();
        let y = down.forward(&up.forward(&input).unwrap().gelu().unwrap()).unwrap();
        outcome(&params.take(), &input, &y, &dy, group)
    };
    let expected = run(&Group::alone());
    for ranks in WORLDS {
        on_threads(ranks, |group| assert_same(&format!("{ranks} ranks"), &run(&group), &expected));
    }
}

#[test]
fn a_parallel_embedding_is_a_table() {
    let whole = weights(&[("table.weight", &[12, 5])]);
    let ids = Tensor::new(&[[0u32, 3, 11, 3], [7, 8, 0, 4]], &Device::Cpu).unwrap();
    let dy = random(7, &[2, 4, 5]);
    let run = |group: &Group| {
        let mut params = Params::from_tensors(whole.clone(), group).unwrap();
        let table = ParallelEmbedding::new(&mut params, "table", 12, 5).unwrap();
        let y = table.forward(&ids).unwrap();
        // A table has no dx, but an outcome needs one.
        let input = Var::from_tensor(&y.zeros_like().unwrap()).unwrap();
        let y = (&y + input.as_tensor()).unwrap();
        outcome(&params.take(), &input, &y, &dy, group)
    };
    let expected = run(&Group::alone());
    let row = |id: usize| vec(&whole[0].1.get(id).unwrap());
    assert_eq!(expected.y[..15], [row(0), row(3), row(11)].concat());
    for ranks in WORLDS {
        on_threads(ranks, |group| assert_same(&format!("{ranks} ranks"), &run(&group), &expected));
    }
}

#[test]
fn sizes_that_cannot_be_cut_are_refused_by_name() {
    on_threads(3, |group| {
        let mut params = Params::from_seed(1, &group);
        let column = ColumnParallelLinear::new(&mut params, "up", 8, 32).unwrap_err().to_string();
        assert!(column.contains("`up.weight`") && column.contains("a multiple of 3"), "{column}");
        let row = RowParallelLinear::new(&mut params, "down", 32, 8).unwrap_err().to_string();
        assert!(row.contains("`down.weight`"), "{row}");
        assert!(ColumnParallelLinear::with_blocks(&mut params, "qkv", 9, 27, 3).is_ok());
        assert!(ColumnParallelLinear::with_blocks(&mut params, "qkv", 9, 24, 3).is_err());
    });
}

#[test]
fn weights_come_from_an_unsharded_file() {
    let path =
        std::env::temp_dir().join(format!("farwire-layers-{}.safetensors", std::process::id()));
    let whole = weights(&SHAPES);
    candle_core::safetensors::save(&whole.iter().cloned().collect(), &path).unwrap();
    on_threads(2, |group| {
        let mut params = Params::from_file(&path, &group).unwrap();
        RowParallelLinear::new(&mut params, "down", 24, 10).unwrap();
        let share = params.take().remove(0);
        assert_eq!(vec(&share.var), vec(&whole[2].1.narrow(1, group.rank() * 12, 12).unwrap()));
        let missing =
            RowParallelLinear::new(&mut params, "sideways", 24, 10).unwrap_err().to_string();
        assert!(missing.contains("no weight `sideways.weight`"), "{missing}");
        let other = RowParallelLinear::new(&mut params, "down", 12, 10).unwrap_err().to_string();
        assert!(other.contains("the model needs [10, 12]"), "{other}");
    });
    std::fs::remove_file(path).unwrap();
}
