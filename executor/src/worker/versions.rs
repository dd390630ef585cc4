//! Weight versions of one stage: kept from the step that makes them to their last reader's backward.

use std::collections::BTreeMap;

use models::tensor::Tensor;
use planner::schedule::Op;

/// The versions a worker holds.
///
/// Versions are counted within one schedule, from 0. Tensors of a version that somebody still has to
/// read are never written: a step then makes new ones. Otherwise it writes over the old ones.
#[derive(Debug)]
pub struct VersionStore {
    held: BTreeMap<usize, Vec<Tensor>>,
    /// Passes of the running schedule that have yet to read each version.
    readers: BTreeMap<usize, usize>,
    newest: usize,
    most: usize,
    stashing: bool,
}

impl VersionStore {
    /// Holds the given weights as version 0.
    ///
    /// Without `stashing` only the newest version is ever kept and read, whatever the schedule says.
    pub fn new(weights: Vec<Tensor>, stashing: bool) -> Self {
        VersionStore {
            held: BTreeMap::from([(0, weights)]),
            readers: BTreeMap::new(),
            newest: 0,
            most: 1,
            stashing,
        }
    }

    /// Begins a schedule: the newest version becomes version 0.
    pub fn begin(&mut self, operations: &[Op]) {
        let weights = self.held.remove(&self.newest).unwrap_or_default();
        self.held = BTreeMap::from([(0, weights)]);
        self.newest = 0;
        self.readers.clear();
        for operation in operations {
            if let Op::Forward { version, .. } | Op::Backward { version, .. } = operation {
                *self.readers.entry(*version).or_default() += 1;
            }
        }
    }

    /// The weights of a version; panics when it is not held, which a checked schedule rules out.
    pub fn get(&self, version: usize) -> &[Tensor] {
        let version = if self.stashing { version } else { self.newest };
        &self.held[&version]
    }

    /// The newest weights.
    pub fn newest(&self) -> &[Tensor] {
        &self.held[&self.newest]
    }

    /// One pass has read a version; the last one frees it.
    pub fn release(&mut self, version: usize) {
        if let Some(readers) = self.readers.get_mut(&version) {
            *readers -= 1;
            if *readers == 0 && version != self.newest {
                self.held.remove(&version);
            }
        }
    }

    /// Makes the next version from the newest one.
    ///
    /// `step` gets the only owners of the tensors when nobody has to read the old version any more.
    pub fn step(&mut self, step: impl FnOnce(Vec<Tensor>) -> Vec<Tensor>) {
        let read_again = self.stashing && self.readers.get(&self.newest).is_some_and(|&n| n > 0);
        let old = if read_again {
            self.held[&self.newest].clone()
        } else {
            self.held.remove(&self.newest).unwrap_or_default()
        };
        self.newest += 1;
        self.held.insert(self.newest, step(old));
        self.most = self.most.max(self.held.len());
    }

    /// Most versions that were held at once.
    pub fn most_held(&self) -> usize {
        self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forward(minibatch: usize, version: usize) -> Op {
        Op::Forward { minibatch, version }
    }

    fn backward(minibatch: usize, version: usize) -> Op {
        Op::Backward { minibatch, version }
    }

    fn weights(value: f32) -> Vec<Tensor> {
        vec![Tensor::from_f32(&[1], [value])]
    }

    fn value(weights: &[Tensor]) -> f32 {
        weights[0].f32s()[0]
    }

    /// Adds one, in place when it may.
    fn increment(mut old: Vec<Tensor>) -> Vec<Tensor> {
        match old[0].f32s_mut() {
            Some(values) => values[0] += 1.0,
            None => old = weights(value(&old) + 1.0),
        }
        old
    }

    #[test]
    fn a_version_lives_until_its_last_backward() {
        // Depth 2: the second minibatch still reads version 0 after the first step.
        let operations = [
            forward(0, 0),
            forward(1, 0),
            backward(0, 0),
            forward(2, 1),
            backward(1, 0),
            backward(2, 1),
        ];
        let mut store = VersionStore::new(weights(0.0), true);
        store.begin(&operations);
        for version in [0, 0, 0] {
            store.release(version);
        }
        store.step(increment);
        assert_eq!((value(store.get(0)), value(store.get(1))), (0.0, 1.0));
        store.release(1);
        store.release(0);
        assert!(!store.held.contains_key(&0));
        store.step(increment);
        assert_eq!((value(store.get(1)), value(store.get(2))), (1.0, 2.0));
        store.release(1);
        assert_eq!(store.held.len(), 1);
        assert_eq!(store.most_held(), 2);
        store.begin(&operations);
        assert_eq!(value(store.get(0)), 2.0);
    }

    #[test]
    fn a_step_writes_over_a_version_without_readers() {
        let mut store = VersionStore::new(weights(0.0), true);
        store.begin(&[forward(0, 0), backward(0, 0)]);
        let memory = store.newest()[0].buffer_id();
        store.release(0);
        store.release(0);
        store.step(increment);
        assert_eq!(store.newest()[0].buffer_id(), memory);
        assert_eq!(store.most_held(), 1);
    }

    #[test]
    fn without_stashing_everybody_reads_the_newest() {
        let mut store = VersionStore::new(weights(0.0), false);
        store.begin(&[forward(0, 0), forward(1, 0), backward(0, 0), backward(1, 0)]);
        store.step(increment);
        assert_eq!(value(store.get(0)), 1.0);
        assert_eq!(store.most_held(), 1);
    }
}
