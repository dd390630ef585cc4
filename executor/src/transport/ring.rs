//! Means over the replicas of a stage, in an order of summation that is the same wherever they run.
//!
//! The elements of all tensors together make as many chunks as there are replicas. Chunk `c` is summed from
//! replica `c` on, then `c + 1`, and so on around. A ring gets this order for free: in `replicas - 1` hops
//! the chunk gathers the replicas' parts, and the last of them divides and sends the mean around (bandwidth-optimal: Patarasuk
//! and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009).

use std::ops::Range;

use models::tensor::{DType, Tensor};

use super::Group;

/// Elements that are summed while they are in the cache.
const BLOCK: usize = 1024;

/// In which order each element is summed.
#[derive(Clone, Copy, Debug)]
pub struct SumOrder {
    pub replicas: usize,
    /// Of all tensors together.
    pub elements: usize,
}

impl SumOrder {
    /// Elements of a chunk.
    fn chunk(self, index: usize) -> Range<usize> {
        index * self.elements / self.replicas..(index + 1) * self.elements / self.replicas
    }

    /// Mean of what replicas gave for the tensor that begins at element `offset`: each part with the place of
    /// the replica that gave it, in ascending order, at least one.
    ///
    /// The mean lies in the memory of the first part when nobody else holds it.
    pub fn mean(self, mut parts: Vec<(usize, Tensor)>, offset: usize) -> Tensor {
        let (first_place, mut first) = parts.remove(0);
        if parts.is_empty() {
            return first;
        }
        if !first.is_unique() {
            first = Tensor::from_f32(first.shape(), first.f32s());
        }
        let share = 1.0 / (parts.len() + 1) as f32;
        let len = first.len();
        let target = first.f32s_mut().expect("it was copied when shared");
        let mut sums = [0.0; BLOCK];
        for chunk in 0..self.replicas {
            let Range { start, end } = self.chunk(chunk);
            let (start, end) = (start.max(offset), end.min(offset + len));
            let mut begin = start;
            while begin < end {
                let range = begin - offset..end.min(begin + BLOCK) - offset;
                begin += range.len();
                let sums = &mut sums[..range.len()];
                let mut givers = 0;
                for place in (chunk..self.replicas).chain(0..chunk) {
                    let part = if place == first_place {
                        &target[range.clone()]
                    } else if let Some((_, part)) = parts.iter().find(|(p, _)| *p == place) {
                        &part.f32s()[range.clone()]
                    } else {
                        continue;
                    };
                    if givers == 0 {
                        sums.copy_from_slice(part);
                    } else {
                        sums.iter_mut().zip(part).for_each(|(sum, &v)| *sum += v);
                    }
                    givers += 1;
                }
                let target = target[range].iter_mut().zip(sums);
                target.for_each(|(target, sum)| *target = *sum * share);
            }
        }
        first
    }
}

/// Part of an all-reduce on its way from one replica to the next.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// Who reduces.
    pub group: Group,
    /// Which of the group's all-reduces.
    pub round: u64,
    /// Which chunk.
    pub index: usize,
    /// Replica that sends it on counted from the one where it began, from 1.
    pub hops: usize,
    /// Replicas whose part is in it.
    pub givers: usize,
    /// Shapes of all tensors of the all-reduce, for replicas that gave none; empty without givers.
    pub shapes: Vec<Vec<usize>>,
    /// Sums, later means, of the chunk's elements; empty without givers.
    pub values: Tensor,
}

/// One replica's part in an all-reduce.
#[derive(Debug)]
pub struct Ring {
    group: Group,
    place: usize,
    /// What this replica gives.
    given: Option<Vec<Tensor>>,
    /// Made when the first chunk is ready.
    means: Option<Vec<Tensor>>,
    ready: usize,
}

impl Ring {
    /// The replica at `place` joins; gives the chunk that begins here, for the next replica.
    pub fn begin(
        group: Group,
        round: u64,
        place: usize,
        given: Option<Vec<Tensor>>,
    ) -> (Self, Chunk) {
        let mut chunk = Chunk {
            group: group.clone(),
            round,
            index: place,
            hops: 0,
            givers: 0,
            shapes: Vec::new(),
            values: Tensor::zeros(DType::F32, &[0]),
        };
        let ring = Ring {
            group,
            place,
            given,
            means: None,
            ready: 0,
        };
        ring.add(&mut chunk);
        chunk.hops = 1;
        (ring, chunk)
    }

    /// Takes a chunk from the replica before; gives what is to be sent to the next.
    pub fn take(&mut self, mut chunk: Chunk) -> Option<Chunk> {
        let around = self.group.replicas - 1;
        if chunk.hops <= around {
            self.add(&mut chunk);
        }
        if chunk.hops == around && chunk.givers > 1 {
            let share = 1.0 / chunk.givers as f32;
            let sums = unique(&mut chunk.values);
            sums.iter_mut().for_each(|sum| *sum *= share);
        }
        if chunk.hops >= around {
            self.keep(&chunk);
        }
        chunk.hops += 1;
        (chunk.hops <= 2 * around).then_some(chunk)
    }

    /// Whether all chunks are here.
    pub fn is_ready(&self) -> bool {
        self.ready == self.group.replicas
    }

    /// Place of the replica that chunks are sent to.
    pub fn next(&self) -> usize {
        (self.place + 1) % self.group.replicas
    }

    /// The means, once [`Self::is_ready`].
    pub fn into_means(self) -> Vec<Tensor> {
        self.means.unwrap_or_default()
    }

    /// Adds this replica's part.
    fn add(&self, chunk: &mut Chunk) {
        let Some(given) = &self.given else {
            return;
        };
        let range = self.order(given).chunk(chunk.index);
        if chunk.givers == 0 {
            chunk.shapes = given.iter().map(|t| t.shape().to_vec()).collect();
            chunk.values = Tensor::zeros(DType::F32, &[range.len()]);
        }
        let first = chunk.givers == 0;
        let values = unique(&mut chunk.values);
        for (at, tensor, part) in parts(given, range) {
            let part = &given[tensor].f32s()[part];
            let values = &mut values[at..at + part.len()];
            if first {
                values.copy_from_slice(part);
            } else {
                values.iter_mut().zip(part).for_each(|(sum, &v)| *sum += v);
            }
        }
        chunk.givers += 1;
    }

    /// Copies means to their places.
    fn keep(&mut self, chunk: &Chunk) {
        self.ready += 1;
        if chunk.givers == 0 {
            return;
        }
        let means = self.means.get_or_insert_with(|| {
            let shapes = chunk.shapes.iter();
            shapes.map(|s| Tensor::zeros(DType::F32, s)).collect()
        });
        let order = SumOrder {
            replicas: self.group.replicas,
            elements: means.iter().map(Tensor::len).sum(),
        };
        let values = chunk.values.f32s();
        for (at, tensor, part) in parts(means, order.chunk(chunk.index)) {
            let part = &mut unique(&mut means[tensor])[part];
            part.copy_from_slice(&values[at..at + part.len()]);
        }
    }

    fn order(&self, tensors: &[Tensor]) -> SumOrder {
        SumOrder {
            replicas: self.group.replicas,
            elements: tensors.iter().map(Tensor::len).sum(),
        }
    }
}

/// Where a range of all elements lies: position in the range, tensor, elements of the tensor.
fn parts(tensors: &[Tensor], range: Range<usize>) -> Vec<(usize, usize, Range<usize>)> {
    let mut offset = 0;
    let mut parts = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let begin = range.start.max(offset);
        let end = range.end.min(offset + tensor.len());
        if begin < end {
            parts.push((begin - range.start, index, begin - offset..end - offset));
        }
        offset += tensor.len();
    }
    parts
}

/// The elements to write; a copy is made first when others hold the memory.
fn unique(tensor: &mut Tensor) -> &mut [f32] {
    if !tensor.is_unique() {
        *tensor = Tensor::from_f32(tensor.shape(), tensor.f32s());
    }
    tensor.f32s_mut().expect("it was copied when shared")
}
