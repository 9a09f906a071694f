//! A codec, and what it owes.

use std::sync::{PoisonError, RwLock};

use farwire::{CodecChoice, CodecSpec, ErrorFeedback};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::comm::{Comm, interruptible};
use crate::failure::Failure;
use crate::process::Mine;

/// A codec with error feedback, the state of compression on one rank.
///
/// Every rank makes its own, with the same settings, and keeps it for the whole run: what the codec
/// leaves out of a step is remembered under the tensor's name and sent with the next step.
///
/// >>> top = farwire.Compressor("topk:0.01")
/// >>> comm.all_reduce(gradient, op="mean", codec=top, name="layer1.weight")
#[pyclass(frozen, subclass, module = "farwire")]
pub(crate) struct Compressor {
    inner: Mine<RwLock<farwire::Compressor>>,
}

/// A text that lists the codecs by name and says what they do.
#[pyfunction]
pub(crate) fn codec_help() -> String {
    CodecSpec::help()
}

/// A codec by name, or `auto`.
pub(crate) fn choice(name: &str) -> PyResult<CodecChoice> {
    name.parse().map_err(|error: farwire::ChoiceError| PyValueError::new_err(error.to_string()))
}

/// Restores saved residuals.
pub(crate) fn feedback(py: Python<'_>, bytes: &[u8]) -> PyResult<ErrorFeedback> {
    ErrorFeedback::from_bytes(bytes).map_err(|error| Failure::call(error.to_string()).raise(py))
}

impl Compressor {
    /// Another handle to the same state.
    pub(crate) fn handle(&self, py: Python<'_>) -> PyResult<farwire::Compressor> {
        let inner = self.inner.get().map_err(|failure| failure.raise(py))?;
        Ok(inner.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

#[pymethods]
impl Compressor {
    #[new]
    #[pyo3(signature = (codec, *, comm=None, feedback=true, dense_below=0, seed=0))]
    fn new(
        py: Python<'_>,
        codec: &str,
        comm: Option<&Comm>,
        feedback: bool,
        dense_below: usize,
        seed: u64,
    ) -> PyResult<Self> {
        let inner = match (choice(codec)?, comm) {
            (CodecChoice::Given(codec), _) => farwire::Compressor::new(codec),
            (choice, Some(comm)) => {
                let comm = comm.open(py)?;
                let policy = interruptible(py, move || choice.settle(&comm, &comm))?;
                let policy = policy.map_err(|error| Failure::from(error).raise(py))?;
                farwire::Compressor::by_size(policy)
            }
            (_, None) => {
                let text = format!("{codec} measures what is fastest: give comm=, on all ranks");
                return Err(PyValueError::new_err(text));
            }
        };
        let inner = inner.dense_below(dense_below).seed(seed);
        let inner = if feedback { inner } else { inner.without_feedback() };
        Ok(Self { inner: Mine::new(RwLock::new(inner)) })
    }

    /// The codec's name; a list of names if the codec depends on the length.
    #[getter]
    fn name(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.handle(py)?.name())
    }

    /// How much is owed for a tensor: the Euclidean norms of what this rank's messages left out,
    /// and of what it left out of sums. None if nothing was ever compressed under that name.
    fn owed(&self, py: Python<'_>, name: &str) -> PyResult<Option<(f64, f64)>> {
        let compressor = self.handle(py)?;
        let norms = compressor.feedback().and_then(|feedback| feedback.norms(name));
        Ok(norms.map(|norms| (norms.worker, norms.owner)))
    }

    /// Everything that is owed, as the bytes of a safetensors file. Each rank has its own.
    fn state_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyDict>> {
        let compressor = self.handle(py)?;
        let bytes = py.detach(|| compressor.feedback().map(ErrorFeedback::to_bytes));
        let state = pyo3::types::PyDict::new(py);
        state.set_item("codec", compressor.name())?;
        state.set_item("residuals", bytes.map(|bytes| PyBytes::new(py, &bytes)))?;
        Ok(state)
    }

    /// Goes on from what `state_dict` returned.
    fn load_state_dict(&self, py: Python<'_>, state: &Bound<'_, PyAny>) -> PyResult<()> {
        let residuals: Option<Vec<u8>> = state.get_item("residuals")?.extract()?;
        let Some(residuals) = residuals else { return Ok(()) };
        let restored = feedback(py, &residuals)?;
        let inner = self.inner.get().map_err(|failure| failure.raise(py))?;
        let mut inner = inner.write().unwrap_or_else(PoisonError::into_inner);
        *inner = inner.clone().with_feedback(restored);
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("farwire.Compressor({:?})", self.handle(py)?.name()))
    }
}
