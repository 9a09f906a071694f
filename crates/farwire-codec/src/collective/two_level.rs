//! Two levels: an all-reduce that adds up on each host as it is, and encodes only what crosses
//! hosts.
//!
//! Columns and cells are those of a [`Placement`]: on each host one rank serves a column, and the
//! result of a cell is made on one host.
//!
//! 1. *Scatter on the host.* Every rank sends each column, in f32, to the rank that serves it
//!    there, which adds up what it gets, in rank order.
//! 2. *Scatter.* That rank encodes the host's sum plus residual, and sends each cell's message to
//!    the rank that serves the column on the cell's host.
//! 3. *Gather.* That rank decodes and adds the messages in the order of hosts, encodes the sum plus
//!    its owner residual, and sends the message to the ranks that serve the column on other hosts.
//! 4. *Gather on the host.* Each rank passes the messages of all cells of its columns on to the
//!    others on its host. Every rank decodes the same bytes.
//!
//! Between hosts this is `two_phase.rs` with hosts for ranks, column by column. A codec sees a
//! host's sum, so a rank owes only for its columns: with R ranks on a host, 1/R of the vector. If
//! it still owes for other columns, from a call that took another route, it adds that to what it
//! sends in step 1.
//!
//! As there, long vectors go in chunks, each one step behind the one before it:
//!
//! ```text
//! round      0   1   2   3   4   5   6   7
//! chunk 0    1       2       3           4
//! chunk 1        1       2       ···
//! ```

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use farwire_proto::{Placement, Rank, WorldSize};

use super::two_phase::CHUNK;
use super::vectors::{ChunkPlace, StepError, Vectors};
use super::{Common, Kind, Made, Nonsense, Trouble, even, scale, seal, unseal};
use crate::codec::MessageCodec;
use crate::error::DecodeError;

/// Bytes before each message in a parcel that give its length.
const LENGTH: usize = size_of::<u64>();

#[derive(Debug)]
pub(super) struct TwoLevel {
    codec: Arc<dyn MessageCodec>,
    placement: Placement,
    chunks: Vec<Chunk>,
    /// The phase and the chunk of each round.
    rounds: Vec<(Phase, usize)>,
    mean: bool,
    longest: usize,
}

#[derive(Debug)]
struct Chunk {
    columns: Vec<Column>,
    /// The phase whose parcels are due next; `None` once the chunk is done.
    next: Option<Phase>,
}

#[derive(Debug)]
struct Column {
    range: Range<usize>,
    /// By host.
    cells: Vec<Range<usize>>,
    /// The host's sum, from when it is made until it is encoded.
    sum: Vec<f32>,
    /// The messages with the results of all cells, by host, to be passed on.
    results: Vec<Bytes>,
}

/// The messages that have arrived for a column.
struct ColumnMessages<'m> {
    column: usize,
    by_host: Vec<&'m [u8]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    ScatterOnHost,
    Scatter,
    Gather,
    GatherOnHost,
}

impl Phase {
    const ALL: [Self; 4] = [Self::ScatterOnHost, Self::Scatter, Self::Gather, Self::GatherOnHost];

    fn after(self) -> Option<Self> {
        Self::ALL.into_iter().skip_while(|phase| *phase != self).nth(1)
    }
}

impl TwoLevel {
    pub(super) fn new(
        codec: Arc<dyn MessageCodec>,
        count: usize,
        placement: &Placement,
        mean: bool,
    ) -> Self {
        let count_of_chunks = if codec.is_local() { count.div_ceil(CHUNK).max(1) } else { 1 };
        let cut = |chunk: usize| {
            let start = chunk * CHUNK;
            let end = if chunk + 1 == count_of_chunks { count } else { start + CHUNK };
            Chunk { columns: columns(start, end - start, placement), next: Some(Phase::ALL[0]) }
        };
        let chunks: Vec<_> = (0..count_of_chunks).map(cut).collect();
        // At each step every chunk is one phase ahead of the next chunk.
        let steps = 0..chunks.len() + Phase::ALL.len() - 1;
        let at = |step: usize| {
            let chunk = move |(behind, phase)| Some((phase, step.checked_sub(behind)?));
            Phase::ALL.into_iter().enumerate().filter_map(chunk)
        };
        let rounds = steps.flat_map(at).filter(|(_, chunk)| *chunk < chunks.len()).collect();
        let longest = longest(&*codec, &chunks, placement);
        Self { codec, placement: placement.clone(), chunks, rounds, mean, longest }
    }

    pub(super) fn rounds(&self) -> u32 {
        self.rounds.len() as u32
    }

    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// The elements whose sum over all hosts a rank encodes, in ascending ranges.
    pub(super) fn owned(&self, rank: Rank) -> Vec<Range<usize>> {
        let host = self.placement.seat(rank).host;
        let columns = |chunk| self.columns_of(rank).map(move |c: usize| (chunk, c));
        let owned = self.chunks.iter().flat_map(columns);
        owned.map(|(chunk, c)| chunk.columns[c].cells[host].clone()).collect()
    }

    fn columns_of(&self, rank: Rank) -> impl Iterator<Item = usize> + use<> {
        self.placement.columns_of(rank)
    }

    /// The other ranks on a rank's host.
    fn mates(&self, rank: Rank) -> impl Iterator<Item = Rank> {
        let host = self.placement.seat(rank).host;
        self.placement.ranks(host).iter().copied().filter(move |mate| *mate != rank)
    }

    pub(super) fn next(
        &mut self,
        round: u32,
        common: &mut Common,
    ) -> Option<Result<Made, Trouble>> {
        let (phase, chunk) = self.rounds[round as usize];
        if let Some(said) = common.trouble_in(round) {
            return Some(said);
        }
        if self.chunks[chunk].next != Some(phase) {
            return None;
        }
        let made = match phase {
            Phase::ScatterOnHost => self.send_columns(round, chunk, common),
            Phase::Scatter => self.encode_sums(round, chunk, common),
            Phase::Gather => self.encode_results(round, chunk, common),
            Phase::GatherOnHost => Ok(self.pass_on(chunk, common)),
        };
        Some(made.map(Made::Each))
    }

    pub(super) fn came(
        &mut self,
        round: u32,
        messages: &[&[u8]],
        common: &mut Common,
    ) -> Result<(), Nonsense> {
        let (phase, chunk) = self.rounds[round as usize];
        let done =
            self.nothing_else_came(phase, messages, common.rank).and_then(|()| match phase {
                Phase::ScatterOnHost => self.add_up(chunk, messages, common),
                Phase::Scatter => self.add_up_hosts(chunk, messages, common),
                Phase::Gather => self.take_results(chunk, messages, common),
                Phase::GatherOnHost => self.take_from_mates(chunk, messages, common),
            });
        common.understood(round, done)?;
        self.chunks[chunk].next = phase.after();
        Ok(())
    }

    /// Refuses messages from ranks that have none to send in a phase.
    fn nothing_else_came(
        &self,
        phase: Phase,
        messages: &[&[u8]],
        rank: Rank,
    ) -> Result<(), StepError> {
        let on_host = matches!(phase, Phase::ScatterOnHost | Phase::GatherOnHost);
        let here = self.placement.seat(rank).host;
        let is_silent = |from: &Rank| (self.placement.seat(*from).host == here) != on_host;
        let silent = self.placement.world().others(rank).filter(is_silent);
        match silent.map(|from| (from, messages[from.index()].len())).find(|(_, len)| *len > 0) {
            None => Ok(()),
            Some((from, given)) => {
                Err(StepError::Decode { from, why: DecodeError::Length { need: 0, given } })
            }
        }
    }

    /// 1. Sends each column of the others on this host to the rank that serves it.
    fn send_columns(
        &self,
        round: u32,
        chunk: usize,
        common: &mut Common,
    ) -> Result<Vec<Bytes>, Trouble> {
        let rank = common.rank;
        let mut parcels = vec![seal(Vec::new()); common.world.len()];
        let vectors = common.vectors.host();
        let mut fault = None;
        // This rank's own columns stay here, but are checked all the same: the rank that has a NaN
        // should report it, not the rank that adds it up.
        for mate in std::iter::once(rank).chain(self.mates(rank)) {
            let ranges =
                || self.columns_of(mate).map(|c| self.chunks[chunk].columns[c].range.clone());
            let elements = ranges().map(|range| range.len()).sum::<usize>();
            let bytes = if mate == rank { 0 } else { elements * size_of::<f32>() };
            let mut parcel = Vec::with_capacity(bytes + 1);
            for range in ranges() {
                let start = range.start;
                let wrong = vectors.read(range, mate != rank, |values| {
                    if mate != rank {
                        parcel.extend_from_slice(bytemuck::cast_slice(values));
                    }
                    first_not_finite(values)
                });
                fault = [fault, wrong.map(|index| start + index)].into_iter().flatten().min();
            }
            parcels[mate.index()] = seal(parcel);
        }
        match fault {
            Some(element) => Err(common.fail(round, Kind::Input, element as u64)),
            None => Ok(parcels),
        }
    }

    /// Receives step 1: adds up the host's sums.
    fn add_up(
        &mut self,
        chunk: usize,
        messages: &[&[u8]],
        common: &mut Common,
    ) -> Result<(), StepError> {
        let (rank, vectors) = (common.rank, common.vectors.host());
        let host = self.placement.seat(rank).host;
        let own: Vec<_> = self.columns_of(rank).collect();
        let need = own.iter().map(|c| self.chunks[chunk].columns[*c].range.len()).sum::<usize>();
        let need = need * size_of::<f32>();
        for mate in self.mates(rank) {
            let given = messages[mate.index()].len();
            if given != need {
                let why = DecodeError::Length { need, given };
                return Err(StepError::Decode { from: mate, why });
            }
        }
        let mut start = 0;
        for c in own {
            let column = &mut self.chunks[chunk].columns[c];
            let bytes = start..start + column.range.len() * size_of::<f32>();
            start = bytes.end;
            let mut sum = vectors.buffer(column.range.len());
            sum.clear();
            for from in self.placement.ranks(host) {
                if *from == rank {
                    vectors.read(column.range.clone(), false, |values| {
                        add(&mut sum, values.iter().copied());
                    });
                } else {
                    let values = messages[from.index()][bytes.clone()].chunks_exact(4);
                    add(&mut sum, values.map(bytemuck::pod_read_unaligned));
                }
            }
            column.sum = sum;
        }
        // This rank no longer owes anything for the others' columns: it has sent all of it.
        for mate in self.mates(rank) {
            for c in self.columns_of(mate) {
                vectors.clear_owed(self.chunks[chunk].columns[c].range.clone());
            }
        }
        Ok(())
    }

    /// 2. Encodes this host's sums, and sends each cell to where it is added up.
    fn encode_sums(
        &mut self,
        round: u32,
        chunk: usize,
        common: &mut Common,
    ) -> Result<Vec<Bytes>, Trouble> {
        let mut messages = HashMap::new();
        for c in self.columns_of(common.rank) {
            let sum = std::mem::take(&mut self.chunks[chunk].columns[c].sum);
            let place = self.place(chunk, c, common);
            let (first, vectors) = (place.range.start, common.vectors.host());
            let encoded = vectors.encode_values(&place, (&sum[..]).into(), vectors.len());
            vectors.give_back(sum);
            let encoded =
                encoded.map_err(|error| common.fail_step(round, error, Kind::Sum, first))?;
            for (host, message) in encoded.into_iter().enumerate() {
                messages.insert((c, host), message);
            }
        }
        Ok(self.to_other_hosts(common, |c, to| messages[&(c, to)].clone()))
    }

    /// Receives step 2: adds up the sums over all hosts.
    fn add_up_hosts(
        &self,
        chunk: usize,
        messages: &[&[u8]],
        common: &mut Common,
    ) -> Result<(), StepError> {
        for came in self.by_column(messages, common.rank)? {
            let ColumnMessages { column: c, by_host: messages } = came;
            let place = self.place(chunk, c, common);
            let added = common.vectors.host().sum(&place, &messages);
            added.map_err(|error| self.named(error, c))?;
        }
        Ok(())
    }

    /// 3. Encodes the results of this rank's cells, and sends them to the other hosts.
    fn encode_results(
        &mut self,
        round: u32,
        chunk: usize,
        common: &mut Common,
    ) -> Result<Vec<Bytes>, Trouble> {
        let host = self.placement.seat(common.rank).host;
        for c in self.columns_of(common.rank) {
            let place = self.place(chunk, c, common);
            let first = place.shards[host].start;
            let encoded = common.vectors.host().encode_sum(&place);
            let message =
                encoded.map_err(|error| common.fail_step(round, error, Kind::Sum, first))?;
            let results = &mut self.chunks[chunk].columns[c].results;
            results.resize(self.placement.hosts(), Bytes::new());
            results[host] = message;
        }
        let columns = &self.chunks[chunk].columns;
        Ok(self.to_other_hosts(common, |c, _| columns[c].results[host].clone()))
    }

    /// Receives step 3: decodes the results of this rank's columns.
    fn take_results(
        &mut self,
        chunk: usize,
        messages: &[&[u8]],
        common: &mut Common,
    ) -> Result<(), StepError> {
        let host = self.placement.seat(common.rank).host;
        for came in self.by_column(messages, common.rank)? {
            let ColumnMessages { column: c, by_host: messages } = came;
            let place = self.place(chunk, c, common);
            let range = place.range.clone();
            let vectors = common.vectors.host();
            let decoded = vectors.decode(&place, &messages);
            decoded.map_err(|error| self.named(error, c))?;
            scale(&mut vectors.output[range], self.mean, common.world);
            for (from, message) in messages.into_iter().enumerate() {
                if from != host {
                    self.chunks[chunk].columns[c].results[from] = seal(message.to_vec());
                }
            }
        }
        Ok(())
    }

    /// 4. Passes the same messages on to the others on this host.
    fn pass_on(&mut self, chunk: usize, common: &Common) -> Vec<Bytes> {
        let mut packed = Vec::new();
        for c in self.columns_of(common.rank) {
            let results = std::mem::take(&mut self.chunks[chunk].columns[c].results);
            results.iter().for_each(|message| pack(&mut packed, unseal(message)));
        }
        let packed = seal(packed);
        let mut parcels = vec![seal(Vec::new()); common.world.len()];
        for mate in self.mates(common.rank) {
            parcels[mate.index()] = packed.clone();
        }
        parcels
    }

    /// Receives step 4: decodes the results of the others' columns.
    fn take_from_mates(
        &self,
        chunk: usize,
        messages: &[&[u8]],
        common: &mut Common,
    ) -> Result<(), StepError> {
        let hosts = self.placement.hosts();
        for mate in self.mates(common.rank) {
            let wrong = |why| StepError::Decode { from: mate, why };
            let columns: Vec<_> = self.columns_of(mate).collect();
            let unpacked = unpack(messages[mate.index()], columns.len() * hosts).map_err(wrong)?;
            for (c, messages) in columns.into_iter().zip(unpacked.chunks(hosts)) {
                let place = self.place(chunk, c, common);
                let output = &mut common.vectors.host().output;
                for (message, host) in messages.iter().zip((0..).map(Rank)) {
                    let out = &mut output[place.shards[host.index()].clone()];
                    self.codec.decode_into(message, &place.shard(host), out).map_err(wrong)?;
                }
                scale(&mut output[place.range.clone()], self.mean, common.world);
            }
        }
        Ok(())
    }

    /// The parcels for ranks on other hosts: a message for each column that the receiver and this
    /// rank both serve. `message` makes it, given the column and the host.
    fn to_other_hosts(
        &self,
        common: &Common,
        message: impl Fn(usize, usize) -> Bytes,
    ) -> Vec<Bytes> {
        let here = self.placement.seat(common.rank).host;
        let parcel = |to| {
            let mut packed = Vec::new();
            let there = self.placement.seat(to).host;
            if there != here {
                let shared = self.placement.shared_columns(common.rank, to);
                shared.for_each(|c| pack(&mut packed, unseal(&message(c, there))));
            }
            seal(packed)
        };
        common.world.ranks().map(parcel).collect()
    }

    /// What has arrived from other hosts: for each of this rank's columns, a message from each.
    fn by_column<'m>(
        &self,
        messages: &[&'m [u8]],
        rank: Rank,
    ) -> Result<Vec<ColumnMessages<'m>>, StepError> {
        let here = self.placement.seat(rank).host;
        let mut unpacked = HashMap::new();
        let elsewhere = self.placement.world().ranks();
        for from in elsewhere.filter(|from| self.placement.seat(*from).host != here) {
            let shared: Vec<_> = self.placement.shared_columns(rank, from).collect();
            let messages = unpack(messages[from.index()], shared.len());
            let messages = messages.map_err(|why| StepError::Decode { from, why })?;
            unpacked.extend(shared.into_iter().map(|c| (c, from)).zip(messages));
        }
        let by_host = |c| {
            let owners = (0..self.placement.hosts()).map(|host| self.placement.owner(c, host));
            // This rank keeps its own.
            owners.map(|owner| unpacked.get(&(c, owner)).copied().unwrap_or_default()).collect()
        };
        let column = |c| ColumnMessages { column: c, by_host: by_host(c) };
        Ok(self.columns_of(rank).map(column).collect())
    }

    /// Names the rank that a message for a column came from, in an error that only knows the host.
    fn named(&self, error: StepError, column: usize) -> StepError {
        match error {
            StepError::Decode { from, why } => {
                StepError::Decode { from: self.placement.owner(column, from.index()), why }
            }
            error => error,
        }
    }

    /// A column as a vector of its own, with hosts for ranks.
    fn place(&self, chunk: usize, column: usize, common: &Common) -> ChunkPlace<'_> {
        let index = chunk * self.placement.columns() + column;
        let Column { range, cells, .. } = &self.chunks[chunk].columns[column];
        ChunkPlace {
            index,
            range: range.clone(),
            shards: cells,
            context: common.context.chunk(index as u64),
            rank: Rank(self.placement.seat(common.rank).host as u32),
            world: WorldSize::new(self.placement.hosts() as u32).expect("there are hosts"),
            // In the end the sum is divided by the number of ranks, not of hosts.
            mean: false,
            gather: true,
            codec: &*self.codec,
        }
    }
}

/// A part of a vector, cut into columns and cells.
fn columns(start: usize, len: usize, placement: &Placement) -> Vec<Column> {
    let hosts = placement.hosts();
    let cells = WorldSize::new((placement.columns() * hosts) as u32).expect("there are ranks");
    let cells = even(len, cells).into_iter().map(|cell| start + cell.start..start + cell.end);
    let cells: Vec<_> = cells.collect();
    let column = |cells: &[Range<usize>]| Column {
        range: cells[0].start..cells[hosts - 1].end,
        cells: cells.to_vec(),
        sum: Vec::new(),
        results: Vec::new(),
    };
    cells.chunks(hosts).map(column).collect()
}

/// Bytes of the longest parcel that any rank makes.
fn longest(codec: &dyn MessageCodec, chunks: &[Chunk], placement: &Placement) -> usize {
    let columns = || chunks.iter().flat_map(|chunk| &chunk.columns);
    let column = columns().map(|column| column.range.len()).max().unwrap_or(0);
    let cell = columns().flat_map(|column| &column.cells).map(ExactSizeIterator::len).max();
    let message = LENGTH + codec.max_message_len(cell.unwrap_or(0));
    let served = |rank| placement.columns_of(rank).count();
    let served = placement.world().ranks().map(served).max().unwrap_or(0);
    served * (column * size_of::<f32>()).max(placement.hosts() * message)
}

/// Appends a message to a parcel of several.
fn pack(parcel: &mut Vec<u8>, message: &[u8]) {
    parcel.extend((message.len() as u64).to_le_bytes());
    parcel.extend_from_slice(message);
}

/// The messages in a parcel, which must hold exactly `count`.
fn unpack(mut parcel: &[u8], count: usize) -> Result<Vec<&[u8]>, DecodeError> {
    let mut messages = Vec::with_capacity(count);
    for _ in 0..count {
        let given = parcel.len();
        let short = |need| DecodeError::Length { need, given };
        let (length, rest) = parcel.split_first_chunk().ok_or(short(LENGTH))?;
        let length = usize::try_from(u64::from_le_bytes(*length));
        let length = length.map_err(|_| DecodeError::Field("length"))?;
        let (message, rest) =
            rest.split_at_checked(length).ok_or(short(length.saturating_add(LENGTH)))?;
        messages.push(message);
        parcel = rest;
    }
    match parcel.len() {
        0 => Ok(messages),
        given => Err(DecodeError::Length { need: 0, given }),
    }
}

/// The index of the first NaN or infinity. (A pass without branches first checks whether there is
/// one.)
fn first_not_finite(values: &[f32]) -> Option<usize> {
    let largest = values.iter().fold(0, |most, value| most.max(value.to_bits() & !(1 << 31)));
    let is_finite = largest < f32::INFINITY.to_bits();
    if is_finite { None } else { values.iter().position(|value| !value.is_finite()) }
}

/// Adds values to a sum. An empty sum is set to them.
fn add(sum: &mut Vec<f32>, values: impl Iterator<Item = f32>) {
    if sum.is_empty() {
        sum.extend(values);
    } else {
        sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }
}
