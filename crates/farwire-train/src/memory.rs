//! Where gradients are while they are summed up and exchanged: in host memory, or, with the feature
//! `cuda`, on a card. Only this file works on them there.

use std::borrow::Cow;
#[cfg(feature = "cuda")]
use std::{ops::Range, sync::Arc};

#[cfg(feature = "cuda")]
use farwire_cuda::{Buffer, DeviceTensor, DeviceValues, NotFiniteElements, Training};

use crate::exchange::{Bucket, ExchangeError, Part, Reducer, Reducing};
use crate::finite::{self, BadElement, Cause};
use crate::library::LibraryResult;

/// Where a library keeps its gradients and weights.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Memory {
    /// The host's.
    #[default]
    Host,
    /// A card's.
    #[cfg(feature = "cuda")]
    Card(Arc<Training>),
}

/// A parameter's gradient, where it was computed.
#[derive(Debug)]
#[non_exhaustive]
pub enum Values<'a> {
    /// In host memory.
    Host(&'a [f32]),
    /// On a card, in f32. By the time its taker drops it, the last access to it is on the card's
    /// queue.
    #[cfg(feature = "cuda")]
    Card(DeviceTensor),
}

impl Values<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            #[cfg(feature = "cuda")]
            Self::Card(tensor) => tensor.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> From<&'a [f32]> for Values<'a> {
    fn from(values: &'a [f32]) -> Self {
        Self::Host(values)
    }
}

impl<'a> From<&'a Vec<f32>> for Values<'a> {
    fn from(values: &'a Vec<f32>) -> Self {
        Self::Host(values)
    }
}

impl<'a, const N: usize> From<&'a [f32; N]> for Values<'a> {
    fn from(values: &'a [f32; N]) -> Self {
        Self::Host(values)
    }
}

/// A parameter's gradient that has been exchanged: the mean over all replicas.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Mean<'a> {
    /// In host memory.
    Host(&'a [f32]),
    /// On a card.
    #[cfg(feature = "cuda")]
    Card(CardMean<'a>),
}

impl<'a> Mean<'a> {
    /// Its elements, if they are in host memory.
    pub fn host(&self) -> Option<&'a [f32]> {
        match self {
            Self::Host(values) => Some(values),
            #[cfg(feature = "cuda")]
            Self::Card(_) => None,
        }
    }

    /// Its elements, fetched from a card if they are there.
    pub fn to_host(&self) -> LibraryResult<Cow<'a, [f32]>> {
        match self {
            Self::Host(values) => Ok(Cow::Borrowed(values)),
            #[cfg(feature = "cuda")]
            Self::Card(mean) => Ok(Cow::Owned(mean.fetch()?)),
        }
    }

    /// The sum of its squares; not finite where an element is not.
    pub fn squares(&self) -> f64 {
        match self {
            Self::Host(values) => values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum(),
            #[cfg(feature = "cuda")]
            Self::Card(mean) => mean.squares,
        }
    }
}

/// A mean that is on a card.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug)]
pub struct CardMean<'a> {
    bucket: &'a Buffer<f32>,
    range: Range<usize>,
    squares: f64,
}

#[cfg(feature = "cuda")]
impl<'a> CardMean<'a> {
    /// Its elements.
    pub fn values(&self) -> DeviceValues<'a> {
        self.bucket.part(self.range.clone())
    }

    fn fetch(&self) -> LibraryResult<Vec<f32>> {
        Ok(self.bucket.download()?[self.range.clone()].to_vec())
    }
}

/// What each bucket holds: sums before it is sent, means after.
#[derive(Debug)]
pub(crate) enum BucketData {
    Host(Vec<Vec<f32>>),
    #[cfg(feature = "cuda")]
    Card(CardBuckets),
}

impl BucketData {
    /// In host memory.
    pub(crate) fn new(buckets: &[Bucket]) -> Self {
        Self::Host(buckets.iter().map(|bucket| vec![0.0; bucket.len()]).collect())
    }

    /// In `memory`.
    pub(crate) fn on(memory: &Memory, buckets: &[Bucket]) -> LibraryResult<Self> {
        match memory {
            Memory::Host => Ok(Self::new(buckets)),
            #[cfg(feature = "cuda")]
            Memory::Card(training) => Ok(Self::Card(CardBuckets::new(training, buckets)?)),
        }
    }

    /// A step begins: no gradient has come.
    pub(crate) fn begin(&mut self, buckets: &[Bucket]) {
        match self {
            Self::Host(data) => {
                for (bucket, data) in buckets.iter().zip(data) {
                    data.clear();
                    data.resize(bucket.len(), 0.0);
                }
            }
            #[cfg(feature = "cuda")]
            Self::Card(card) => card.refused.fill(false),
        }
    }

    /// Adds a parameter's gradient, the first of the step if `fresh`. Returns what is now known to
    /// be not finite; a card reports that only at the end of the step.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "for a card"))]
    pub(crate) fn add(
        &mut self,
        bucket: usize,
        (index, part): (usize, &Part),
        fresh: bool,
        gradient: Values<'_>,
    ) -> Result<Option<Cause>, ExchangeError> {
        match (self, gradient) {
            (Self::Host(data), Values::Host(gradient)) => {
                let sum = &mut data[bucket][part.range.clone()];
                let is_finite = finite::add(sum, gradient);
                let bad = (!is_finite).then(|| BadElement::first(&part.name, sum)).flatten();
                Ok(bad.map(Cause::Gradient))
            }
            #[cfg(feature = "cuda")]
            (Self::Card(card), gradient) => {
                let added = card.add(bucket, index, part.range.start, fresh, gradient);
                added.map_err(|error| ExchangeError::Card { name: part.name.clone(), error })?;
                Ok(None)
            }
            #[cfg(feature = "cuda")]
            (Self::Host(_), Values::Card(_)) => {
                let name = part.name.clone();
                let error = "its gradient is on a card, and the exchange in host memory; make the \
                             exchange with the library's memory";
                Err(ExchangeError::Card { name, error: error.into() })
            }
        }
    }

    /// What a bucket holds before it is sent; empty for one on a card.
    pub(crate) fn sums(&self, bucket: usize) -> &[f32] {
        match self {
            Self::Host(data) => &data[bucket],
            #[cfg(feature = "cuda")]
            Self::Card(_) => &[],
        }
    }

    /// Hands a full bucket to the reducer.
    pub(crate) fn start<R: Reducer>(
        &mut self,
        reducer: &mut R,
        buckets: &[Bucket],
        next: usize,
    ) -> Reducing {
        match self {
            Self::Host(data) => {
                let data = std::mem::take(&mut data[next]);
                Reducing::Host(reducer.start(&buckets[next], data))
            }
            #[cfg(feature = "cuda")]
            Self::Card(card) => {
                let data = (&card.buffers[next]).into();
                Reducing::Card(reducer.start_on_card(&buckets[next], data))
            }
        }
    }

    /// A bucket's mean has come; `None` if it is in place already.
    pub(crate) fn put(&mut self, index: usize, mean: Option<Vec<f32>>) {
        if let (Self::Host(data), Some(mean)) = (self, mean) {
            data[index] = mean;
        }
    }

    /// A bucket has no mean, since something in it is not finite.
    pub(crate) fn refuse(&mut self, index: usize, bucket: &Bucket) {
        match self {
            Self::Host(data) => data[index] = vec![f32::NAN; bucket.len()],
            #[cfg(feature = "cuda")]
            Self::Card(card) => card.refused[index] = true,
        }
    }

    /// Checks the means of all buckets. Returns whether they are finite, and if not, what this rank
    /// knows.
    pub(crate) fn look(&mut self, buckets: &[Bucket]) -> LibraryResult<(bool, Option<Cause>)> {
        let mut found = None;
        let is_finite = match self {
            Self::Host(data) => data.iter().all(|mean| finite::is_finite(mean)),
            #[cfg(feature = "cuda")]
            Self::Card(card) => {
                card.sum_squares(buckets)?;
                let is_finite = card.squares.iter().flatten().all(|square| square.is_finite());
                if !is_finite {
                    found = card.first_bad(buckets)?.map(Cause::Gradient);
                }
                is_finite
            }
        };
        if !is_finite && found.is_none() {
            for (name, mean) in self.means(buckets) {
                // Most means are finite, and need not come to the host.
                if !mean.squares().is_finite() {
                    found = BadElement::first(name, &mean.to_host()?).map(Cause::Mean);
                    break;
                }
            }
        }
        Ok((is_finite, found))
    }

    /// The means, by name.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "for a card"))]
    pub(crate) fn means<'a>(
        &'a self,
        buckets: &'a [Bucket],
    ) -> impl Iterator<Item = (&'a str, Mean<'a>)> {
        buckets.iter().enumerate().flat_map(move |(index, bucket)| {
            bucket.parts.iter().enumerate().map(move |(at, part)| {
                let Part { name, range, .. } = part;
                let mean = match self {
                    Self::Host(data) => Mean::Host(&data[index][range.clone()]),
                    #[cfg(feature = "cuda")]
                    Self::Card(card) => Mean::Card(CardMean {
                        bucket: &card.buffers[index],
                        range: range.clone(),
                        squares: card.squares[index][at],
                    }),
                };
                (&name[..], mean)
            })
        })
    }
}

/// Buckets on a card.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub(crate) struct CardBuckets {
    training: Arc<Training>,
    buffers: Vec<Arc<Buffer<f32>>>,
    /// The elements of sums that are not finite, by part.
    found: NotFiniteElements,
    /// The place in `found` of each bucket's first part.
    places: Vec<usize>,
    /// Sums of squares of the means, by bucket and part.
    squares: Vec<Vec<f64>>,
    /// Whether a bucket has no mean, by bucket.
    refused: Vec<bool>,
}

#[cfg(feature = "cuda")]
impl CardBuckets {
    fn new(training: &Arc<Training>, buckets: &[Bucket]) -> LibraryResult<Self> {
        let device = training.device();
        let mut parts = 0;
        let places = buckets.iter().map(|bucket| {
            let place = parts;
            parts += bucket.parts.len();
            place
        });
        let places = places.collect();
        Ok(Self {
            training: training.clone(),
            buffers: buckets
                .iter()
                .map(|bucket| Ok(Arc::new(device.zeros(bucket.len())?)))
                .collect::<LibraryResult<_>>()?,
            found: NotFiniteElements::new(device, parts)?,
            places,
            squares: buckets.iter().map(|bucket| vec![0.0; bucket.parts.len()]).collect(),
            refused: vec![false; buckets.len()],
        })
    }

    fn add(
        &mut self,
        bucket: usize,
        part: usize,
        at: usize,
        fresh: bool,
        gradient: Values<'_>,
    ) -> LibraryResult<()> {
        let tensor = match gradient {
            Values::Card(tensor) => tensor,
            Values::Host(values) => (&Arc::new(self.training.device().upload(values)?)).into(),
        };
        let found = (&mut self.found, self.places[bucket] + part);
        Ok(self.training.add(&self.buffers[bucket], at, fresh, &tensor, found)?)
    }

    fn sum_squares(&mut self, buckets: &[Bucket]) -> LibraryResult<()> {
        let parts = buckets.iter().zip(&self.buffers).flat_map(|(bucket, buffer)| {
            bucket.parts.iter().map(|part| buffer.part(part.range.clone()))
        });
        let mut squares = self.training.squares(&parts.collect::<Vec<_>>())?.into_iter();
        for (sums, refused) in self.squares.iter_mut().zip(&self.refused) {
            for (sum, square) in sums.iter_mut().zip(&mut squares) {
                *sum = if *refused { f64::NAN } else { square };
            }
        }
        Ok(())
    }

    /// The first element of this rank's own gradients that is not finite.
    fn first_bad(&self, buckets: &[Bucket]) -> LibraryResult<Option<BadElement>> {
        let parts = buckets.iter().flat_map(|bucket| &bucket.parts);
        let mut bad = parts.zip(self.found.fetch()?).filter_map(|(part, found)| {
            let (index, value) = found?;
            Some(BadElement { parameter: part.name.clone(), index, value })
        });
        Ok(bad.next())
    }
}
