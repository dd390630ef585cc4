//! Gradients that are reduced together, so that the all-reduce of the last layers goes on while the backward
//! of the first ones still runs.

use models::tensor::Tensor;

use crate::work::Work;

/// A bucket is full at this size where nobody says otherwise: large enough that messages are few, small enough that the
/// first is full long before the backward ends.
pub const BUCKET_BYTES: usize = 4 << 20;

/// How a stage's gradients are spread over buckets, in the order in which a backward finishes them.
#[derive(Debug, PartialEq, Eq)]
pub struct Buckets {
    /// Weights of each bucket.
    members: Vec<Vec<usize>>,
    /// Bucket of each weight, and its place in there.
    places: Vec<(usize, usize)>,
}

impl Buckets {
    /// The buckets of a program with these weights, full at `limit` bytes.
    pub fn new(program: &Work, weights: &[Tensor], limit: usize) -> Self {
        let bytes: Vec<usize> = weights.iter().map(Tensor::bytes).collect();
        Buckets::of(program.backward_order(), &bytes, limit)
    }

    fn of(order: impl Iterator<Item = usize>, bytes: &[usize], limit: usize) -> Self {
        let mut members: Vec<Vec<usize>> = Vec::new();
        let mut places = vec![(0, 0); bytes.len()];
        let mut filled = limit;
        for weight in order {
            if filled >= limit {
                members.push(Vec::new());
                filled = 0;
            }
            let bucket = members.len() - 1;
            places[weight] = (bucket, members[bucket].len());
            members[bucket].push(weight);
            filled += bytes[weight];
        }
        Buckets { members, places }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// Weights of a bucket, in the order of its tensors.
    pub fn members(&self, bucket: usize) -> &[usize] {
        &self.members[bucket]
    }
}

/// Buckets that a backward is filling.
#[derive(Debug)]
pub struct Filling<'a> {
    buckets: &'a Buckets,
    tensors: Vec<Vec<Option<Tensor>>>,
    missing: Vec<usize>,
}

impl<'a> Filling<'a> {
    /// All empty.
    pub fn new(buckets: &'a Buckets) -> Self {
        Filling {
            buckets,
            tensors: buckets
                .members
                .iter()
                .map(|m| vec![None; m.len()])
                .collect(),
            missing: buckets.members.iter().map(Vec::len).collect(),
        }
    }

    /// Puts a gradient in; gives the bucket that is full now, with its number.
    pub fn put(&mut self, weight: usize, gradient: Tensor) -> Option<(usize, Vec<Tensor>)> {
        let (bucket, place) = self.buckets.places[weight];
        self.tensors[bucket][place] = Some(gradient);
        self.missing[bucket] -= 1;
        if self.missing[bucket] > 0 {
            return None;
        }
        let full = std::mem::take(&mut self.tensors[bucket]);
        Some((bucket, full.into_iter().flatten().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_fill_in_the_order_of_the_backward() {
        // Backward finishes weights 3, 2, 0, 1.
        let buckets = Buckets::of([3, 2, 0, 1].into_iter(), &[6, 2, 8, 1], 8);
        assert_eq!(buckets.members, [vec![3, 2], vec![0, 1]]);
        let tensor = |v: f32| Tensor::from_f32(&[1], [v]);
        let mut filling = Filling::new(&buckets);
        assert!(filling.put(3, tensor(3.0)).is_none());
        let (bucket, full) = filling.put(2, tensor(2.0)).unwrap();
        assert_eq!((bucket, full.len()), (0, 2));
        assert_eq!(full[1].f32s(), [2.0]);
        assert!(filling.put(0, tensor(0.0)).is_none());
        assert_eq!(filling.put(1, tensor(1.0)).unwrap().0, 1);
    }

    #[test]
    fn a_stage_without_weights_has_no_buckets() {
        assert_eq!(Buckets::of([].into_iter(), &[], 8).count(), 0);
    }
}
