//! Residuals as a safetensors file.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::pieces::Pieces;
use super::{Entry, ErrorFeedback, FeedbackError, lock};

impl ErrorFeedback {
    /// The committed residuals, as a safetensors file. Each piece is a tensor named
    /// `worker:START:NAME`, `owner:START:NAME` or `warm:0:NAME`.
    pub fn to_bytes(&self) -> Vec<u8> {
        let tensors = lock(&self.tensors);
        let pieces = tensors.iter().flat_map(|(name, Entry { state, .. })| {
            let kind = |kind: &'static str, pieces: &'_ Pieces| {
                let pieces = pieces.0.iter().map(move |(start, values)| {
                    (format!("{kind}:{start}:{name}"), values.values())
                });
                pieces.collect::<Vec<_>>()
            };
            let warm = state.warm.iter().map(|values| (format!("warm:0:{name}"), values.clone()));
            kind("worker", &state.worker)
                .into_iter()
                .chain(kind("owner", &state.owner))
                .chain(warm)
                .collect::<Vec<_>>()
        });
        let pieces: Vec<_> = pieces.collect();
        let views = pieces.iter().map(|(key, values)| {
            let view =
                TensorView::new(Dtype::F32, vec![values.len()], bytemuck::cast_slice(values));
            (key.as_str(), view.expect("four bytes for each element"))
        });
        safetensors::serialize(views, None).expect("a header of names and lengths")
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FeedbackError> {
        let file = SafeTensors::deserialize(bytes)?;
        let mut tensors = BTreeMap::<String, Entry>::new();
        for (key, view) in file.iter() {
            let refuse = |why| FeedbackError::Content { key: key.into(), why };
            let mut parts = key.splitn(3, ':');
            let (Some(kind), Some(start), Some(name)) = (parts.next(), parts.next(), parts.next())
            else {
                return Err(refuse("its name is not KIND:START:NAME"));
            };
            let start: usize = start.parse().map_err(|_| refuse("START is not a number"))?;
            if view.dtype() != Dtype::F32 || view.shape().len() != 1 {
                return Err(refuse("it is not a vector of f32"));
            }
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(view.data());
            if values.iter().any(|value| !value.is_finite()) {
                return Err(refuse("it holds a NaN or an infinity"));
            }
            if start.checked_add(values.len()).is_none() {
                return Err(refuse("START is too large"));
            }
            let state = &mut tensors.entry(name.into()).or_default().state;
            let pieces = match kind {
                "worker" => &mut state.worker,
                "owner" => &mut state.owner,
                "warm" => {
                    state.warm = Some(Arc::new(values));
                    continue;
                }
                _ => return Err(refuse("KIND is none of worker, owner, warm")),
            };
            if values.is_empty() {
                return Err(refuse("it has no elements"));
            }
            if pieces.overlaps(&(start..start + values.len())) {
                return Err(refuse("it overlaps another piece"));
            }
            pieces.0.insert(start, values.into());
        }
        Ok(Self { tensors: Arc::new(Mutex::new(tensors)) })
    }

    /// Writes [`to_bytes`](Self::to_bytes) to a file, which is replaced as a whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), FeedbackError> {
        let wrong = |error| FeedbackError::File { path: path.into(), error };
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}.partial", std::process::id()));
        let write = || {
            let mut file = std::fs::File::create(&beside)?;
            file.write_all(&self.to_bytes())?;
            // The new name must not reach the disk before the content does.
            file.sync_all()?;
            std::fs::rename(&beside, path)
        };
        write().map_err(|error| {
            let _ = std::fs::remove_file(&beside);
            wrong(error)
        })
    }

    /// Reads what [`save`](Self::save) wrote.
    pub fn load(path: &Path) -> Result<Self, FeedbackError> {
        let bytes = std::fs::read(path)
            .map_err(|error| FeedbackError::File { path: path.into(), error })?;
        Self::from_bytes(&bytes)
    }
}

impl From<safetensors::SafeTensorError> for FeedbackError {
    fn from(error: safetensors::SafeTensorError) -> Self {
        Self::Format(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::feedback::tests::with;

    #[test]
    fn what_is_saved_is_restored() {
        let feedback = with(&[1.0, -2.5, 1e-40], &[4.0]);
        let mut transaction = feedback.begin("a:b/c").unwrap();
        transaction.set_worker(5, vec![3.0]);
        transaction.commit();
        let folder = std::env::temp_dir().join(format!("farwire-feedback-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("feedback.safetensors");
        feedback.save(&path).unwrap();
        let back = ErrorFeedback::load(&path).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "no other file is left");
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(back.names(), ["a:b/c", "w"]);
        assert_eq!(back.norms("w"), feedback.norms("w"));
        assert_eq!(back.to_bytes(), feedback.to_bytes());
        assert!(
            ErrorFeedback::load(&path).unwrap_err().to_string().contains("feedback.safetensors")
        );
    }

    #[test]
    fn files_with_other_content_are_refused() {
        let file = |key: &str, dtype, shape: Vec<usize>, values: &[f32]| {
            let view = TensorView::new(dtype, shape, bytemuck::cast_slice(values)).unwrap();
            safetensors::serialize([(key, view)], None).unwrap()
        };
        for bytes in [
            b"nonsense".to_vec(),
            file("w", Dtype::F32, vec![1], &[1.0]),
            file("worker:x:w", Dtype::F32, vec![1], &[1.0]),
            file("other:0:w", Dtype::F32, vec![1], &[1.0]),
            file("worker:0:w", Dtype::F32, vec![1], &[f32::NAN]),
            file("worker:0:w", Dtype::F32, vec![1, 1], &[1.0]),
            file("worker:0:w", Dtype::I32, vec![1], &[1.0]),
            file("worker:18446744073709551615:w", Dtype::F32, vec![1], &[1.0]),
            file("owner:3:w", Dtype::F32, vec![0], &[]),
            file("warm:0:w", Dtype::F32, vec![1], &[f32::INFINITY]),
        ] {
            ErrorFeedback::from_bytes(&bytes).unwrap_err();
        }
    }
}
