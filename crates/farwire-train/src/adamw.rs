//! AdamW on plain vectors, in host memory or on a card. The same gradients give the same bits, and
//! the state can be saved, cut and joined like the parameters it belongs to.

use std::borrow::Cow;
use std::collections::BTreeMap;

#[cfg(feature = "cuda")]
use farwire_cuda::{AdamWStep, Buffer, DeviceTensor, Training};

use crate::library::LibraryResult;
#[cfg(feature = "cuda")]
use crate::memory::CardMean;
use crate::rules::Rules;

/// Adam with decoupled weight decay.
#[derive(Debug)]
pub struct AdamW {
    /// By parameter name.
    moments: BTreeMap<String, Held>,
    decay: Rules<f64>,
    /// Updates made.
    steps: u32,
}

/// Running means of a parameter's gradient and of its square.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moments {
    /// Of the gradient.
    pub first: Vec<f32>,
    /// Of its square.
    pub second: Vec<f32>,
}

/// Moments where they are used.
#[derive(Debug)]
enum Held {
    Host(Moments),
    #[cfg(feature = "cuda")]
    Card {
        first: Buffer<f32>,
        second: Buffer<f32>,
    },
}

/// A parameter's gradient in one step.
#[derive(Clone, Copy, Debug)]
pub struct Gradient<T> {
    /// Its elements.
    pub data: T,
    /// The elements are multiplied by this.
    pub scale: f64,
    /// The learning rate.
    pub rate: f64,
    /// The share of the elements that a codec sent; the others are zero.
    pub density: f64,
}

const BETA: (f64, f64) = (0.9, 0.95);
const EPSILON: f64 = 1e-8;

impl AdamW {
    /// An optimizer with weight decay by parameter name.
    pub fn new(decay: Rules<f64>) -> Self {
        Self { moments: BTreeMap::new(), decay, steps: 0 }
    }

    /// Begins the next update: call it once, before the parameters are updated.
    pub fn begin(&mut self) {
        self.steps += 1;
    }

    /// Updates one parameter in host memory.
    ///
    /// # Panics
    ///
    /// If the parameter was updated on a card before: its moments stay there.
    pub fn update(&mut self, name: &str, parameter: &mut [f32], gradient: Gradient<&[f32]>) {
        let Numbers { scale, beta1, beta2, step, root, decay } = self.numbers(name, &gradient);
        let moments = self.moments.entry(name.to_owned()).or_insert_with(Held::new).host();
        moments.first.resize(parameter.len(), 0.0);
        moments.second.resize(parameter.len(), 0.0);
        let state = moments.first.iter_mut().zip(&mut moments.second);
        for ((x, g), (first, second)) in parameter.iter_mut().zip(gradient.data).zip(state) {
            let g = g * scale;
            *first = beta1 * *first + (1.0 - beta1) * g;
            *second = beta2 * *second + (1.0 - beta2) * g * g;
            *x = *x * decay - step * *first / (second.sqrt() / root + EPSILON as f32);
        }
    }

    /// Updates one parameter on a card. Its moments are kept there from then on.
    #[cfg(feature = "cuda")]
    pub fn update_on_card(
        &mut self,
        training: &Training,
        name: &str,
        parameter: DeviceTensor,
        gradient: Gradient<CardMean<'_>>,
    ) -> LibraryResult<()> {
        let Numbers { scale, beta1, beta2, step, root, decay } = self.numbers(name, &gradient);
        let numbers = AdamWStep { scale, beta1, beta2, step, root, decay, epsilon: EPSILON as f32 };
        let held = self.moments.entry(name.to_owned()).or_insert_with(Held::new);
        if let Held::Host(moments) = held {
            let device = training.device();
            moments.first.resize(parameter.len(), 0.0);
            moments.second.resize(parameter.len(), 0.0);
            let (first, second) = (device.upload(&moments.first)?, device.upload(&moments.second)?);
            *held = Held::Card { first, second };
        }
        if let Held::Card { first, second } = held {
            training.adamw(parameter, (first, second), gradient.data.values(), &numbers)?;
        }
        Ok(())
    }

    fn numbers<T>(&self, name: &str, gradient: &Gradient<T>) -> Numbers {
        let Gradient { scale, rate, density, .. } = *gradient;
        // Error feedback brings gradients late, as sums over many steps. Momentum would only delay
        // them further.
        let beta1 = BETA.0 * density.sqrt();
        let decay = 1.0 - rate * self.decay.of(name);
        let steps = i32::try_from(self.steps).unwrap_or(i32::MAX);
        let (bias1, bias2) = (1.0 - beta1.powi(steps), 1.0 - BETA.1.powi(steps));
        Numbers {
            scale: scale as f32,
            beta1: beta1 as f32,
            beta2: BETA.1 as f32,
            step: (rate / bias1) as f32,
            root: bias2.sqrt() as f32,
            decay: decay as f32,
        }
    }

    /// Updates made so far.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// A parameter's state, fetched from a card if it is there; `None` before the first update.
    pub fn moments(&self, name: &str) -> LibraryResult<Option<Cow<'_, Moments>>> {
        Ok(match self.moments.get(name) {
            None => None,
            Some(Held::Host(moments)) => Some(Cow::Borrowed(moments)),
            #[cfg(feature = "cuda")]
            Some(Held::Card { first, second }) => {
                Some(Cow::Owned(Moments { first: first.download()?, second: second.download()? }))
            }
        })
    }

    /// Continues from a saved state.
    pub fn restore(&mut self, steps: u32, moments: impl IntoIterator<Item = (String, Moments)>) {
        self.steps = steps;
        let held = |(name, moments)| (name, Held::Host(moments));
        self.moments = moments.into_iter().map(held).collect();
    }
}

impl Held {
    fn new() -> Self {
        Self::Host(Moments::default())
    }

    fn host(&mut self) -> &mut Moments {
        match self {
            Self::Host(moments) => moments,
            #[cfg(feature = "cuda")]
            Self::Card { .. } => panic!("this parameter's moments are on a card"),
        }
    }
}

/// Numbers that are the same for all elements of a parameter.
struct Numbers {
    scale: f32,
    beta1: f32,
    beta2: f32,
    /// The learning rate, corrected for the first moment's bias.
    step: f32,
    /// Divides the root of the second moment, to correct its bias.
    root: f32,
    decay: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One parameter of one element against the definition in f64.
    #[test]
    fn updates_follow_the_definition() {
        let mut adam = AdamW::new(Rules::new(0.1));
        let (mut x, mut exact, mut m, mut v) = ([0.5f32], 0.5f64, 0.0, 0.0);
        for step in 1..50 {
            let g = (f64::from(step) * 0.7).sin();
            adam.begin();
            adam.update(
                "x",
                &mut x,
                Gradient { data: &[g as f32][..], scale: 1.0, rate: 0.01, density: 1.0 },
            );
            (m, v) = (0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g);
            let (mhat, vhat) = (m / (1.0 - 0.9f64.powi(step)), v / (1.0 - 0.95f64.powi(step)));
            exact = exact * (1.0 - 0.01 * 0.1) - 0.01 * mhat / (vhat.sqrt() + 1e-8);
            assert!((f64::from(x[0]) - exact).abs() < 1e-5, "step {step}: {} and {exact}", x[0]);
        }
    }

    /// A sum of gradients that comes in one piece every hundred steps: with full momentum, its
    /// update would still be under way when the next one comes.
    #[test]
    fn momentum_wanes_with_density() {
        let moved_later = |density: f64| {
            let mut adam = AdamW::new(Rules::new(0.0));
            let mut x = [0.0f32];
            let mut step = |g: f32| {
                adam.begin();
                adam.update(
                    "x",
                    &mut x,
                    Gradient { data: &[g][..], scale: 1.0, rate: 0.01, density },
                );
                x[0]
            };
            let at_once = step(1.0);
            let after = (0..50).map(|_| step(0.0)).last().unwrap();
            after / at_once
        };
        assert!(moved_later(0.01) < 1.2 && moved_later(1.0) > 3.0);
    }
}
