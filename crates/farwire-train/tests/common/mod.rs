//! A one-page tensor library, to test training without a real one.
//!
//! ```text
//!  tokens ─▶ row of the embedding ─▶ [ x · scale + bias ] × layers ─▶ x · headᵀ ─▶ loss
//! ```
//!
//! The embedding is cut over the ranks of tp, so everything that a layout can do to a parameter
//! happens here.

use std::collections::HashMap;

use farwire_train::gpt::VOCABULARY;
use farwire_train::{
    Cut, Group, Init, Input, Library, LibraryResult, Param, Sink, Stage, StageSpec,
};

/// The library. The trainer sees each loss as `disturb` changes it.
pub(crate) struct Toy {
    pub(crate) disturb: fn(f32) -> f32,
}

pub(crate) const TOY: Toy = Toy { disturb: |loss| loss };

#[derive(Debug)]
struct ToyStage {
    width: usize,
    group: Group,
    disturb: fn(f32) -> f32,
    /// In the order of forward.
    params: Vec<(Param, Vec<f32>)>,
    held: HashMap<usize, Held>,
}

/// What backward needs of a micro-batch.
#[derive(Debug)]
struct Held {
    tokens: Option<Vec<u32>>,
    /// The input of each layer of this stage, and the output of the last one.
    states: Vec<Vec<f32>>,
    /// Of the logits, if this is the last stage.
    gradient: Vec<f32>,
}

impl Library for Toy {
    fn stage(&self, spec: StageSpec<'_>) -> LibraryResult<Box<dyn Stage>> {
        let StageSpec { model, stage, stages, start, group } = spec;
        let width = model.width;
        let mut params = Vec::new();
        let mut add = |name: String, whole: &[usize], init, cut| -> LibraryResult<()> {
            let (share, cut) = start.get(&name, whole, init, cut, group)?;
            params.push((Param { name, shape: share.shape, cut }, share.data));
            Ok(())
        };
        let table = [VOCABULARY, width];
        if stage == 0 {
            let cut = Some(Cut { dim: 0, blocks: 1 });
            add("embedding.weight".to_owned(), &table, Init::Normal(0.5), cut)?;
        }
        let each = model.layers / stages;
        for layer in stage * each..(stage + 1) * each {
            add(format!("blocks.{layer}.scale"), &[width], Init::Ones, None)?;
            add(format!("blocks.{layer}.bias"), &[width], Init::Zeros, None)?;
        }
        if stage + 1 == stages {
            add("head.weight".to_owned(), &table, Init::Normal(0.1), None)?;
        }
        let (group, disturb, held) = (group.clone(), self.disturb, HashMap::new());
        Ok(Box::new(ToyStage { width, group, disturb, params, held }))
    }
}

impl ToyStage {
    fn param(&self, name: &str) -> Option<&[f32]> {
        self.params.iter().find(|(param, _)| param.name == name).map(|(_, data)| &data[..])
    }

    /// The scales and biases of this stage's layers.
    fn layers(&self) -> Vec<[&(Param, Vec<f32>); 2]> {
        let of = |what| self.params.iter().filter(move |(param, _)| param.name.ends_with(what));
        of(".scale").zip(of(".bias")).map(|(scale, bias)| [scale, bias]).collect()
    }

    /// A token's row in this rank's share of the embedding, if it is there.
    fn row(&self, token: u32) -> Option<usize> {
        let rows = VOCABULARY / self.group.size();
        (token as usize).checked_sub(self.group.rank() * rows).filter(|row| *row < rows)
    }
}

impl Stage for ToyStage {
    fn params(&self) -> Vec<Param> {
        self.params.iter().rev().map(|(param, _)| param.clone()).collect()
    }

    fn weights(&self, name: &str) -> LibraryResult<Vec<f32>> {
        Ok(self.param(name).ok_or("no such parameter")?.to_vec())
    }

    fn set_weights(&mut self, name: &str, weights: &[f32]) -> LibraryResult<()> {
        let param = self.params.iter_mut().find(|(param, _)| param.name == name);
        param.ok_or("no such parameter")?.1.copy_from_slice(weights);
        Ok(())
    }

    fn forward(
        &mut self,
        micro: usize,
        input: Input<'_>,
        targets: Option<&[u32]>,
    ) -> LibraryResult<Vec<f32>> {
        let width = self.width;
        let (tokens, mut x) = match input {
            Input::Hidden(x) => (None, x),
            Input::Tokens(batch) => {
                let table =
                    self.param("embedding.weight").ok_or("tokens are for the first stage")?;
                let row = |token: &u32| match self.row(*token) {
                    Some(row) => table[row * width..(row + 1) * width].to_vec(),
                    None => vec![0.0; width],
                };
                let mine = batch.inputs.iter().flat_map(row).collect();
                (Some(batch.inputs.clone()), self.group.sum(mine)?)
            }
        };
        let mut states = vec![x.clone()];
        for [(_, scale), (_, bias)] in self.layers() {
            x.iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x = *x * scale[i % width] + bias[i % width]);
            states.push(x.clone());
        }
        let mut held = Held { tokens, states, gradient: Vec::new() };
        let Some(head) = self.param("head.weight") else {
            self.held.insert(micro, held);
            return Ok(x);
        };
        let dot = |x: &[f32], row: &[f32]| x.iter().zip(row).map(|(a, b)| a * b).sum::<f32>();
        let logits: Vec<f32> =
            x.chunks(width).flat_map(|x| head.chunks(width).map(|row| dot(x, row))).collect();
        let Some(targets) = targets else { return Ok(logits) };
        let mut loss = 0.0;
        for (logits, target) in logits.chunks(VOCABULARY).zip(targets) {
            let total: f32 = logits.iter().map(|x| x.exp()).sum();
            loss += (total.ln() - logits[*target as usize]) / targets.len() as f32;
            let is_right = |token: usize| if token == *target as usize { 1.0 } else { 0.0 };
            let gradient =
                logits.iter().enumerate().map(|(token, x)| x.exp() / total - is_right(token));
            held.gradient.extend(gradient.map(|g| g / targets.len() as f32));
        }
        self.held.insert(micro, held);
        Ok(vec![(self.disturb)(loss)])
    }

    fn backward(
        &mut self,
        micro: usize,
        mut gradient: Vec<f32>,
        sink: &mut Sink<'_>,
    ) -> LibraryResult<Option<Vec<f32>>> {
        let width = self.width;
        let Held { tokens, mut states, gradient: of_logits } =
            self.held.remove(&micro).ok_or("backward comes after forward")?;
        if let Some(head) = self.param("head.weight") {
            let x = states.last().ok_or("a stage has an output")?;
            let (mut to_head, mut back) = (vec![0.0; head.len()], vec![0.0; x.len()]);
            for (at, g) in of_logits.iter().enumerate() {
                let (place, token, g) =
                    (at / VOCABULARY * width, at % VOCABULARY * width, g * gradient[0]);
                for i in 0..width {
                    to_head[token + i] += g * x[place + i];
                    back[place + i] += g * head[token + i];
                }
            }
            sink("head.weight", (&to_head).into())?;
            gradient = back;
        }
        states.pop();
        for [(scale, factors), (bias, _)] in self.layers().into_iter().rev() {
            let x = states.pop().ok_or("a layer has an input")?;
            let (mut to_scale, mut to_bias) = (vec![0.0; width], vec![0.0; width]);
            for (i, (g, x)) in gradient.iter_mut().zip(x).enumerate() {
                to_scale[i % width] += *g * x;
                to_bias[i % width] += *g;
                *g *= factors[i % width];
            }
            sink(&bias.name, (&to_bias).into())?;
            sink(&scale.name, (&to_scale).into())?;
        }
        let Some(tokens) = tokens else { return Ok(Some(gradient)) };
        let mut to_table = vec![0.0; VOCABULARY / self.group.size() * width];
        for (token, g) in tokens.iter().zip(gradient.chunks(width)) {
            if let Some(row) = self.row(*token) {
                to_table[row * width..].iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
            }
        }
        sink("embedding.weight", (&to_table).into())?;
        Ok(None)
    }
}
