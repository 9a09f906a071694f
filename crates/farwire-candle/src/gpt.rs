//! A GPT: token and position embedding, blocks of causal attention and MLP, norms before each, and
//! a head.
//!
//! ```text
//!  ids ─▶ token + position ─▶ [ x + attention(norm(x)) ─▶ x + mlp(norm(x)) ] × layers ─▶ norm ─▶ logits
//! ```
//!
//! Everything is built from operations that have a backward. Attention is cut by heads, the MLP by
//! columns, the token table and the head by tokens; norms and positions are whole on every rank.

use candle_core::{D, Result, Tensor};
use farwire_train::Init;
use farwire_train::gpt::{Config, VOCABULARY};

use crate::parallel::{ColumnParallelLinear, ParallelEmbedding, RowParallelLinear};
use crate::params::Params;
use crate::stage::{Segment, Stage};

/// One of `stages` equal parts of the model: its blocks, with the embedding before the first and
/// the head after the last.
pub(crate) fn stage(
    params: &mut Params,
    config: Config,
    stage: usize,
    stages: usize,
) -> Result<Stage> {
    let each = config.layers / stages;
    let mut segments = Vec::new();
    if stage == 0 {
        let embedding = Embedding::new(params, config)?;
        segments.push(Segment::new("embedding", params.take(), move |ids| embedding.forward(ids)));
    }
    for index in stage * each..(stage + 1) * each {
        let block = Block::new(params, &format!("blocks.{index}"), config)?;
        segments
            .push(Segment::new(format!("block {index}"), params.take(), move |x| block.forward(x)));
    }
    if stage + 1 == stages {
        let head = Head::new(params, config)?;
        segments.push(Segment::new("head", params.take(), move |x| head.forward(x)));
    }
    Ok(Stage::new(segments, &[config.context, config.width], cross_entropy))
}

struct Embedding {
    token: ParallelEmbedding,
    position: Tensor,
}

impl Embedding {
    fn new(params: &mut Params, config: Config) -> Result<Self> {
        let token = ParallelEmbedding::new(params, "embedding.token", VOCABULARY, config.width)?;
        let shape = [config.context, config.width];
        let position = params.get("embedding.position.weight", &shape, Init::Normal(0.02), None)?;
        Ok(Self { token, position })
    }

    /// From ids `[batch, time]` to `[batch, time, width]`.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let time = ids.dim(1)?;
        self.token.forward(ids)?.broadcast_add(&self.position.narrow(0, 0, time)?)
    }
}

struct Block {
    attention_norm: Norm,
    attention: Attention,
    mlp_norm: Norm,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl Block {
    fn new(params: &mut Params, name: &str, config: Config) -> Result<Self> {
        let width = config.width;
        // Each block adds twice to what passes through it. This deviation keeps the sum's size.
        let deviation = 0.02 / (2.0 * config.layers as f64).sqrt();
        Ok(Self {
            attention_norm: Norm::new(params, &format!("{name}.attention_norm"), width)?,
            attention: Attention::new(params, &format!("{name}.attention"), config, deviation)?,
            mlp_norm: Norm::new(params, &format!("{name}.mlp_norm"), width)?,
            up: ColumnParallelLinear::new(params, &format!("{name}.mlp.up"), width, 4 * width)?,
            down: RowParallelLinear::with_deviation(
                params,
                &format!("{name}.mlp.down"),
                4 * width,
                width,
                deviation,
            )?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention.forward(&self.attention_norm.forward(x)?)?)?;
        let hidden = self.up.forward(&self.mlp_norm.forward(&x)?)?.relu()?;
        x + self.down.forward(&hidden)?
    }
}

/// Causal attention, of which each rank has some heads.
struct Attention {
    qkv: ColumnParallelLinear,
    out: RowParallelLinear,
    head_width: usize,
    mask: Tensor,
}

impl Attention {
    fn new(params: &mut Params, name: &str, config: Config, deviation: f64) -> Result<Self> {
        let Config { heads, width, context, .. } = config;
        let qkv =
            ColumnParallelLinear::with_blocks(params, &format!("{name}.qkv"), width, 3 * width, 3)?;
        let out = RowParallelLinear::with_deviation(
            params,
            &format!("{name}.out"),
            width,
            width,
            deviation,
        )?;
        let mask: Vec<f32> = (0..context)
            .flat_map(|query| (0..context).map(move |key| if key <= query { 0.0 } else { -1e9 }))
            .collect();
        let mask = Tensor::from_vec(mask, (context, context), params.device())?;
        Ok(Self { qkv, out, head_width: width / heads, mask })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, time, _) = x.dims3()?;
        let qkv = self.qkv.forward(x)?;
        let width = qkv.dim(2)? / 3;
        let heads = width / self.head_width;
        // [batch, time, 3 · heads · head width] to [3, batch, heads, time, head width]
        let qkv = qkv
            .reshape((batch, time, 3, heads, self.head_width))?
            .permute((2, 0, 3, 1, 4))?
            .contiguous()?;
        let (q, k, v) = (qkv.get(0)?, qkv.get(1)?, qkv.get(2)?);
        let scores = (q.matmul(&k.t()?)? * (1.0 / (self.head_width as f64).sqrt()))?;
        let mask = self.mask.narrow(0, 0, time)?.narrow(1, 0, time)?;
        let weights = softmax(&scores.broadcast_add(&mask)?)?;
        let seen = weights.matmul(&v)?.transpose(1, 2)?.contiguous()?;
        self.out.forward(&seen.reshape((batch, time, width))?)
    }
}

/// `weight · (x − mean) / √(variance + ε) + bias`, over the last dimension.
struct Norm {
    weight: Tensor,
    bias: Tensor,
}

impl Norm {
    fn new(params: &mut Params, name: &str, width: usize) -> Result<Self> {
        let weight = params.get(&format!("{name}.weight"), &[width], Init::Ones, None)?;
        let bias = params.get(&format!("{name}.bias"), &[width], Init::Zeros, None)?;
        Ok(Self { weight, bias })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        let normed = centred.broadcast_div(&(variance + 1e-5)?.sqrt()?)?;
        normed.broadcast_mul(&self.weight)?.broadcast_add(&self.bias)
    }
}

struct Head {
    norm: Norm,
    linear: ColumnParallelLinear,
}

impl Head {
    fn new(params: &mut Params, config: Config) -> Result<Self> {
        let norm = Norm::new(params, "head.norm", config.width)?;
        let linear =
            ColumnParallelLinear::new(params, "head.linear", config.width, VOCABULARY)?.gathered();
        Ok(Self { norm, linear })
    }

    /// From `[batch, time, width]` to `[batch, time, vocabulary]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.linear.forward(&self.norm.forward(x)?)
    }
}

fn softmax(x: &Tensor) -> Result<Tensor> {
    // The result does not depend on what is subtracted, so that needs no gradient.
    let largest = x.max_keepdim(D::Minus1)?.detach();
    let exponentials = x.broadcast_sub(&largest)?.exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)
}

/// The mean of −ln p(target), over all predictions. Logits are `[…, vocabulary]`, targets u32, one
/// per prediction.
fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let logits = logits.reshape(((), logits.dim(D::Minus1)?))?;
    let shifted = logits.broadcast_sub(&logits.max_keepdim(1)?.detach())?;
    let total = shifted.exp()?.sum_keepdim(1)?.log()?;
    let right = shifted.gather(&targets.flatten_all()?.unsqueeze(1)?, 1)?;
    (total - right)?.mean_all()
}
