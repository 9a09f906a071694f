//! AdamW on plain vectors: the same bits for the same gradients, and a state that can be saved, cut and joined like the parameters it belongs to.

use std::collections::BTreeMap;

use farwire_train::Rules;

/// Adam with decoupled weight decay.
#[derive(Clone, Debug)]
pub struct AdamW {
    /// By parameter name.
    moments: BTreeMap<String, Moments>,
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

const BETA: (f64, f64) = (0.9, 0.95);
const EPSILON: f64 = 1e-8;

impl AdamW {
    /// An optimizer with weight decay by parameter name.
    pub fn new(decay: Rules<f64>) -> Self {
        Self { moments: BTreeMap::new(), decay, steps: 0 }
    }

    /// Begins the next update: call it once before the parameters'.
    pub fn begin(&mut self) {
        self.steps += 1;
    }

    /// Updates one parameter, with its gradient times `scale`.
    pub fn update(&mut self, name: &str, parameter: &mut [f32], gradient: &[f32], scale: f64, rate: f64) {
        let decay = 1.0 - rate * self.decay.of(name);
        let moments = self.moments.entry(name.to_owned()).or_default();
        moments.first.resize(parameter.len(), 0.0);
        moments.second.resize(parameter.len(), 0.0);
        let (beta1, beta2) = (BETA.0 as f32, BETA.1 as f32);
        let steps = i32::try_from(self.steps).unwrap_or(i32::MAX);
        let (bias1, bias2) = (1.0 - BETA.0.powi(steps), 1.0 - BETA.1.powi(steps));
        let (step, root, decay, scale) =
            ((rate / bias1) as f32, bias2.sqrt() as f32, decay as f32, scale as f32);
        let state = moments.first.iter_mut().zip(&mut moments.second);
        for ((x, g), (first, second)) in parameter.iter_mut().zip(gradient).zip(state) {
            let g = g * scale;
            *first = beta1 * *first + (1.0 - beta1) * g;
            *second = beta2 * *second + (1.0 - beta2) * g * g;
            *x = *x * decay - step * *first / (second.sqrt() / root + EPSILON as f32);
        }
    }

    /// Updates made so far.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// A parameter's state; none before its first update.
    pub fn moments(&self, name: &str) -> Option<&Moments> {
        self.moments.get(name)
    }

    /// Goes on from a state that was saved.
    pub fn restore(&mut self, steps: u32, moments: impl IntoIterator<Item = (String, Moments)>) {
        self.steps = steps;
        self.moments = moments.into_iter().collect();
    }
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
            adam.update("x", &mut x, &[g as f32], 1.0, 0.01);
            (m, v) = (0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g);
            let (mhat, vhat) = (m / (1.0 - 0.9f64.powi(step)), v / (1.0 - 0.95f64.powi(step)));
            exact = exact * (1.0 - 0.01 * 0.1) - 0.01 * mhat / (vhat.sqrt() + 1e-8);
            assert!((f64::from(x[0]) - exact).abs() < 1e-5, "step {step}: {} and {exact}", x[0]);
        }
    }
}
