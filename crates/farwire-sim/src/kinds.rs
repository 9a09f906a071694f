//! For each kind of operation: its calls, its result, and the least that it must move.
//!
//! One row per kind, in [`Shape::row`]. The oracle, the lower bound, `farwire sim`, `farwire bench`
//! and the tests need nothing else, so a new kind is a new row here.

use std::ops::Range;

use farwire_proto::{Call, Counts, DType, Kind, Rank, ReduceOp, Tag, WorldSize};

/// The parameters of an operation. Each kind uses those it needs.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The ranks that take part.
    pub world: WorldSize,
    /// Elements of each rank's vector, for kinds that do not cut it into blocks.
    pub count: usize,
    /// The type of the elements.
    pub dtype: DType,
    /// How elements are combined.
    pub op: ReduceOp,
    /// The rank that plays the special part.
    pub root: Rank,
    /// Elements of each rank's block, for kinds that gather, scatter or exchange blocks.
    pub blocks: Counts,
    /// Elements from each rank to each, if that is not `blocks` for every sender.
    pub matrix: Vec<Counts>,
    /// The number of each rank's host; all are on one if it is empty.
    pub hosts: Vec<u64>,
}

/// One rank's part in an operation.
#[derive(Clone, Debug)]
pub struct Row {
    /// Its calls; the first takes the input, the last gives the result.
    pub calls: Vec<Call>,
    /// Its result, part by part.
    pub parts: Vec<Part>,
    /// The least share of the vector's bytes that the busiest rank must send, or receive. For kinds
    /// with blocks, the vector is all of them together.
    pub share: f64,
}

/// A part of a result: elements of the ranks' inputs, combined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The ranks whose elements are combined. With one, its elements as they are; with none, the
    /// operator's identity.
    pub from: Vec<usize>,
    /// Which elements, in each of their inputs.
    pub span: Range<usize>,
    /// Whether the algorithm decides the order. If not, it is that of `from`.
    pub any_order: bool,
}

impl Shape {
    /// A shape with even blocks, and rank 0 as the root.
    pub fn even(world: WorldSize, count: usize, dtype: DType, op: ReduceOp) -> Self {
        let blocks = Counts::even(count, world);
        Self {
            world,
            count,
            dtype,
            op,
            root: Rank(0),
            blocks,
            matrix: Vec::new(),
            hosts: Vec::new(),
        }
    }

    /// Rank `me`'s part in an operation of this kind.
    pub fn row(&self, kind: Kind, me: Rank) -> Row {
        let &Self { world, count, dtype, op, root, .. } = self;
        let n = world.len();
        let others = (n - 1) as f64 / n as f64;
        let row = |call, parts, share| Row { calls: vec![call], parts, share };
        let all = || 0..n;
        let counts = || self.blocks.clone();
        let copy = |from: usize, span| Part { from: vec![from], span, any_order: false };
        let folded = |span| vec![Part { from: all().collect(), span, any_order: true }];
        let scanned =
            |last| vec![Part { from: (0..last).collect(), span: 0..count, any_order: false }];
        let gathered =
            || all().map(|from| copy(from, 0..place(&self.blocks, from).len())).collect();
        let only = |root: Rank, parts: Vec<Part>| if me == root { parts } else { Vec::new() };
        match kind {
            Kind::AllReduce => {
                row(Call::AllReduce { count, dtype, op }, folded(0..count), 2.0 * others)
            }
            Kind::ReduceScatter => {
                // Dealt out in turn: the first ranks get one more if the count does not divide.
                let shard = |rank: usize| (count + n - 1 - rank) / n;
                let start = (0..me.index()).map(shard).sum();
                let mine = folded(start..start + shard(me.index()));
                row(Call::ReduceScatter { count, dtype, op }, mine, others)
            }
            Kind::AllGather => row(Call::AllGather { counts: counts(), dtype }, gathered(), others),
            Kind::Broadcast => {
                row(Call::Broadcast { count, dtype, root }, vec![copy(root.index(), 0..count)], 1.0)
            }
            Kind::Reduce => {
                row(Call::Reduce { count, dtype, op, root }, only(root, folded(0..count)), 1.0)
            }
            Kind::Gather => {
                row(Call::Gather { counts: counts(), dtype, root }, only(root, gathered()), others)
            }
            Kind::Scatter => {
                let mine = vec![copy(root.index(), place(&self.blocks, me.index()))];
                row(Call::Scatter { counts: counts(), dtype, root }, mine, others)
            }
            Kind::AllToAll => {
                let sent = |from: usize| self.matrix.get(from).unwrap_or(&self.blocks);
                let mine = all().map(|from| copy(from, place(sent(from), me.index())));
                let mine: Vec<_> = mine.collect();
                let recv = Counts::listed(
                    mine.iter().map(|part| part.span.len()).collect::<Vec<_>>(),
                    world,
                );
                row(Call::AllToAll { send: sent(me.index()).clone(), recv, dtype }, mine, others)
            }
            Kind::Scan => row(Call::Scan { count, dtype, op }, scanned(me.index() + 1), 1.0),
            Kind::ExclusiveScan => {
                row(Call::ExclusiveScan { count, dtype, op }, scanned(me.index()), 1.0)
            }
            Kind::Barrier => row(Call::Barrier, Vec::new(), 0.0),
            // Every rank sends to its right neighbour.
            Kind::Message => {
                let (to, from, tag) = (world.right_of(me, 1), world.left_of(me, 1), Tag(0));
                let send = Call::Send { to, tag, count, dtype };
                let calls = vec![send, Call::Recv { from, tag, count, dtype }];
                Row { calls, parts: vec![copy(from.index(), 0..count)], share: 1.0 }
            }
        }
    }
}

/// Where a rank's block is, in the vector of all blocks.
fn place(counts: &Counts, rank: usize) -> Range<usize> {
    let len = |rank| counts.of(Rank(rank as u32));
    let start = (0..rank).map(len).sum();
    start..start + len(rank)
}
