//! Parameters as candle's variables: named, in the order they were made, whole or cut over a group.

use std::path::Path;

use candle_core::{Device, Error, Result, Tensor, Var};
use farwire_train::{Array, Arrays, Cut, Group, Init, Start, read_safetensors};

/// A parameter.
#[derive(Clone, Debug)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// This rank's share of it.
    pub var: Var,
    /// How it is cut over the group; `None` if every rank has all of it.
    pub cut: Option<Cut>,
}

/// Makes parameters, and remembers them.
#[derive(Clone, Debug)]
pub struct Params {
    start: Start,
    group: Group,
    device: Device,
    list: Vec<Param>,
}

impl Params {
    /// Parameters whose first values come from `start`.
    pub fn new(start: Start, group: &Group) -> Self {
        Self { start, group: group.clone(), device: Device::Cpu, list: Vec::new() }
    }

    /// The same, made on `device`. Without this they are on the CPU.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        Self { device: device.clone(), ..self }
    }

    /// Random parameters, the same for any group.
    pub fn from_seed(seed: u64, group: &Group) -> Self {
        Self::new(Start::Seed(seed), group)
    }

    /// Parameters from whole tensors.
    pub fn from_tensors(
        tensors: impl IntoIterator<Item = (String, Tensor)>,
        group: &Group,
    ) -> Result<Self> {
        let array = |(name, tensor): (String, Tensor)| {
            Ok((name, Array { shape: tensor.dims().to_vec(), data: values(&tensor)? }))
        };
        let arrays = tensors.into_iter().map(array).collect::<Result<Arrays>>()?;
        Ok(Self::new(Start::Given(arrays), group))
    }

    /// Parameters from a safetensors file of whole tensors.
    pub fn from_file(path: impl AsRef<Path>, group: &Group) -> Result<Self> {
        let arrays = read_safetensors(&std::fs::read(path)?).map_err(Error::msg)?;
        Ok(Self::new(Start::Given(arrays), group))
    }

    /// The ranks that share cut parameters.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The device that they are made on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// This rank's share of a new parameter, whose whole has the shape `whole`.
    pub fn get(
        &mut self,
        name: &str,
        whole: &[usize],
        init: Init,
        cut: Option<Cut>,
    ) -> Result<Tensor> {
        let (share, cut) =
            self.start.get(name, whole, init, cut, &self.group).map_err(Error::msg)?;
        let var = Var::from_vec(share.data, share.shape, &self.device)?;
        let tensor = var.as_tensor().clone();
        self.list.push(Param { name: name.to_owned(), var, cut });
        Ok(tensor)
    }

    /// The parameters made since the last call.
    pub fn take(&mut self) -> Vec<Param> {
        std::mem::take(&mut self.list)
    }
}

pub(crate) fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

pub(crate) fn set(var: &Var, data: &[f32]) -> Result<()> {
    var.set(&Tensor::from_slice(data, var.shape(), var.device())?)
}
