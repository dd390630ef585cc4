//! For a bottleneck T: a plan on servers whose every device, link and network card stays within it.
//!
//! A label is the end of a pipeline: stages from some place on, with their replicas on certain devices. Labels grow
//! backwards by one stage at a time. Of two that begin at the same place and send to stages with the same replicas on
//! the same devices, one is dropped if the other uses no device more and loads no card more: whatever can stand before
//! the one can stand before the other, a stage's depth, and so its memory, growing with the devices behind it.

use std::ops::Range;

use super::places::Places;
use super::spread;
use crate::cost::placement::{CardBytes, Meetings, add_link, add_ring};
use crate::cost::{Fabric, Machine, StageSums};
use crate::schedule::Keeping;
use crate::solve::Recompute;

/// What is searched.
pub struct Search<'a> {
    /// Where stages may begin and end.
    pub places: &'a Places,
    /// The servers.
    pub fabric: &'a Fabric,
    /// Latency and kappa.
    pub machine: Machine,
    /// No stage has more replicas.
    pub most_replicas: usize,
    /// Replicas of every stage, one between each two places, where they are given.
    pub given: Option<&'a [usize]>,
    /// Whether stages may recompute.
    pub recompute: Recompute,
    /// What replicas hold.
    pub keeping: Keeping,
}

/// How much is tried.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Labels that are kept at each place.
    pub labels: usize,
    /// Stages with at most so many ways to put their replicas on devices try all of them; 0 tries only some.
    pub ways: usize,
    /// Numbers of replicas that a stage tries from the fewest on; of the rest only a few.
    pub replicas: usize,
    /// Whether of servers that are alike so far all are tried, or one for all.
    pub servers: Servers,
}

/// What is taken for the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Servers {
    /// Every server is one of its own.
    Each,
    /// Servers alike, with the same on them, are tried in one order: that leaves out plans, since the order of servers
    /// numbers the replicas and so decides which of them meet.
    InOneOrder,
    /// The same, and replicas are taken to meet as often as they can in any order ([`Meetings::AtMost`]): that leaves
    /// out nothing, but what is found need not be as good.
    Relaxed,
}

/// A stage of a plan that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedStage {
    /// Place that it begins at.
    pub start: usize,
    /// Place that it ends at.
    pub end: usize,
    /// Replicas on each slot.
    pub counts: Vec<usize>,
    /// Whether it recomputes.
    pub recompute: bool,
}

/// What a search for one bottleneck says.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Stages in pipeline order, if any were found.
    pub stages: Option<Vec<PlacedStage>>,
    /// Whether nothing was left out: no stages then mean that there are none.
    pub complete: bool,
}

/// A place may use up so many times its part of the budget.
const SHARES: usize = 4;

/// The end of a pipeline.
pub(super) struct Label {
    /// Place that it begins at.
    start: usize,
    /// The label of the stages behind its first one, and the place at which that one ends.
    behind: Option<usize>,
    end: usize,
    /// Replicas of its first stage on each slot, and in each server.
    pub(super) counts: Vec<usize>,
    servers: Vec<usize>,
    recompute: bool,
    /// Devices of each slot that are left.
    pub(super) free: Vec<usize>,
    /// Devices that are used.
    pub(super) devices: usize,
    pub(super) stages: usize,
    /// Bytes of the fullest worker.
    memory: f64,
    /// What each server's card carries so far.
    pub(super) cards: Vec<CardBytes>,
}

/// A later stage that reads from the one that is tried, and what it gets and returns.
struct Flow {
    label: usize,
    activations: f64,
    gradients: f64,
}

impl Search<'_> {
    /// Looks for a plan within the threshold (seconds per minibatch), trying at most `budget` placements of stages.
    pub fn decide(&self, threshold: f64, effort: Effort, budget: &mut usize) -> Answer {
        Run::new(self, threshold, effort, budget).answer()
    }
}

pub(super) struct Run<'a, 'b> {
    pub(super) search: &'a Search<'a>,
    threshold: f64,
    pub(super) effort: Effort,
    pub(super) budget: &'b mut usize,
    pub(super) complete: bool,
    /// What a placement takes of the budget: more where it has to be told for many servers.
    pub(super) size: usize,
    fastest: f64,
    largest_memory: f64,
    fastest_link: f64,
    pub(super) all: Vec<usize>,
    /// Slots of each server, and the first server that is like it.
    pub(super) slots_of: Vec<Range<usize>>,
    pub(super) class_of: Vec<usize>,
    /// Fewest replicas of the stage from each place to each later one, row by row, even on the fastest devices and
    /// links; none if no number suffices.
    fewest: Vec<Option<usize>>,
    /// Devices that the layers of each place need at least; none if no number suffices.
    needed: Vec<Option<usize>>,
    pub(super) labels: Vec<Label>,
    /// Labels that begin at each place.
    pub(super) at: Vec<Vec<usize>>,
}

impl<'a, 'b> Run<'a, 'b> {
    fn new(search: &'a Search<'a>, threshold: f64, effort: Effort, budget: &'b mut usize) -> Self {
        let slots = &search.fabric.slots;
        let largest = |of: &dyn Fn(usize) -> f64| (0..slots.len()).map(of).fold(0.0, f64::max);
        let mut run = Self {
            search,
            threshold,
            effort,
            budget,
            complete: true,
            size: search.fabric.servers().div_ceil(8),
            fastest: largest(&|slot| slots[slot].speed),
            largest_memory: largest(&|slot| slots[slot].memory),
            fastest_link: largest(&|slot| search.fabric.inner[slots[slot].server]),
            all: slots.iter().map(|slot| slot.count).collect(),
            slots_of: search.fabric.slots_of_servers(),
            class_of: search.fabric.classes(),
            fewest: Vec::new(),
            needed: vec![None; search.places.count()],
            labels: Vec::new(),
            at: vec![Vec::new(); search.places.count()],
        };
        let alike = run
            .class_of
            .iter()
            .enumerate()
            .any(|(v, &class)| v != class);
        run.complete = effort.servers != Servers::InOneOrder || !alike;
        let places = search.places.count();
        let pairs = (0..places).flat_map(|start| (0..places).map(move |end| (start, end)));
        run.fewest = pairs
            .map(|(start, end)| run.fewest_replicas(start, end))
            .collect();
        run.needed[0] = Some(0);
        for end in 1..places {
            let sums = (0..end)
                .filter_map(|start| Some(run.needed[start]? + run.fewest[start * places + end]?));
            run.needed[end] = sums.min();
        }
        run
    }

    /// Replicas that the stage needs even on the fastest devices and links. Its loads and memory fall from two on.
    fn fewest_replicas(&self, start: usize, end: usize) -> Option<usize> {
        if start >= end {
            return None;
        }
        let sums = self.search.places.sums(start, end)?;
        let devices: usize = self.all.iter().sum();
        let most = devices.min(self.search.most_replicas);
        if let Some(given) = self.search.given {
            return (end == start + 1).then(|| given[start]);
        }
        let machine = Machine {
            bandwidth: self.fastest_link,
            ..self.search.machine
        };
        let fits = |replicas: usize| {
            self.search.recompute.ways(sums).any(|(sums, _)| {
                let loads = sums.loads(replicas, &machine);
                loads.device() / self.fastest <= self.threshold
                    && loads.network() <= self.threshold
                    && self.memory(&sums, replicas, 1) <= self.largest_memory
            })
        };
        if fits(1) {
            return Some(1);
        }
        if self.search.machine.round.is_some() {
            // The all-reduce grows with the replicas where all stages step together.
            return (2..=most).find(|&replicas| fits(replicas));
        }
        if most < 2 || !fits(most) {
            return None;
        }
        let (mut low, mut high) = (2, most);
        while low < high {
            let middle = usize::midpoint(low, high);
            if fits(middle) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        Some(high)
    }

    fn answer(mut self) -> Answer {
        let last = self.search.places.count() - 1;
        self.labels.push(Label {
            start: last,
            behind: None,
            end: last,
            counts: Vec::new(),
            servers: Vec::new(),
            recompute: false,
            free: self.all.clone(),
            devices: 0,
            stages: 0,
            memory: 0.0,
            cards: vec![CardBytes::default(); self.search.fabric.servers()],
        });
        self.at[last].push(0);
        for place in (1..=last).rev() {
            // A place may use up what it needs, but not leave the ones before it without anything.
            let own = SHARES * self.budget.div_ceil(place);
            let later = self.budget.saturating_sub(own);
            *self.budget -= later;
            for (label, receivers) in self.undominated(place) {
                self.grow(label, &receivers);
            }
            *self.budget += later;
        }
        let best = self.at[0].iter().copied().min_by(|&a, &b| {
            let (a, b) = (&self.labels[a], &self.labels[b]);
            let size = |l: &Label| (l.devices, l.stages);
            size(a).cmp(&size(b)).then(a.memory.total_cmp(&b.memory))
        });
        Answer {
            stages: best.map(|best| self.stages(best)),
            complete: self.complete,
        }
    }

    fn memory(&self, sums: &StageSums, replicas: usize, depth: usize) -> f64 {
        sums.memory_of(replicas, self.search.keeping.holding(replicas, depth, 0))
    }

    fn meetings(&self) -> Meetings {
        match self.effort.servers {
            Servers::Relaxed => Meetings::AtMost,
            Servers::Each | Servers::InOneOrder => Meetings::RoundRobin,
        }
    }

    fn stages(&self, label: usize) -> Vec<PlacedStage> {
        let chain = std::iter::successors(Some(label), |&label| self.labels[label].behind);
        let stages = chain.map(|label| &self.labels[label]);
        let stages = stages.take_while(|label| label.behind.is_some());
        stages
            .map(|label| PlacedStage {
                start: label.start,
                end: label.end,
                counts: label.counts.clone(),
                recompute: label.recompute,
            })
            .collect()
    }

    /// The label of the stage in the chain that holds the layer.
    fn stage_of(&self, label: usize, layer: usize) -> usize {
        let mut stage = label;
        // The first stage from the front that ends behind the layer.
        while !self.search.places.holds(self.labels[stage].end, layer) {
            match self.labels[stage].behind {
                Some(behind) => stage = behind,
                None => break,
            }
        }
        stage
    }

    /// Labels of the stages that read each tensor leaving the place that the label begins at.
    pub(super) fn receivers(&self, label: usize) -> Vec<Vec<usize>> {
        let crossings = self.search.places.crossings(self.labels[label].start);
        let receivers = crossings.iter().map(|crossing| {
            let readers = crossing.readers.iter();
            let mut stages: Vec<usize> = readers.map(|&r| self.stage_of(label, r)).collect();
            stages.sort_unstable();
            stages.dedup();
            stages
        });
        receivers.collect()
    }

    /// Puts every possible stage before the label.
    fn grow(&mut self, label: usize, receivers: &[Vec<usize>]) {
        let end = self.labels[label].start;
        let limits = self.no_more_than(label, receivers);
        let free: usize = self.labels[label].free.iter().sum();
        for start in (0..end).rev() {
            if *self.budget == 0 {
                self.complete = false;
                return;
            }
            let (Some(sums), Some(before)) =
                (self.search.places.sums(start, end), self.needed[start])
            else {
                continue;
            };
            let Some(most) = free.checked_sub(before) else {
                continue;
            };
            let Some(fewest) = self.fewest[start * self.search.places.count() + end] else {
                continue;
            };
            // Following many tensors to their readers is work like trying placements.
            *self.budget = self.budget.saturating_sub(receivers.len() / 2);
            let mut sums = *sums;
            let flows = self.flows(label, start, receivers, &mut sums);
            for replicas in self.replicas_to_try(label, fewest, most, &sums) {
                self.place((label, start, &limits), replicas, &sums, &flows);
            }
        }
    }

    /// What a stage from `start` to the label's beginning sends to each stage of the label; counts it in `sums`.
    fn flows(
        &self,
        label: usize,
        start: usize,
        receivers: &[Vec<usize>],
        sums: &mut StageSums,
    ) -> Vec<Flow> {
        let crossings = self.search.places.crossings(self.labels[label].start);
        let mut flows: Vec<Flow> = Vec::new();
        sums.traffic.output = 0.0;
        sums.traffic.output_gradient = 0.0;
        for (crossing, stages) in crossings.iter().zip(receivers) {
            if self.search.places.holds(start, crossing.producer) {
                continue;
            }
            for &stage in stages {
                sums.traffic.output += crossing.bytes;
                sums.traffic.output_gradient += crossing.gradient_bytes;
                let place = flows.iter().position(|flow| flow.label == stage);
                let place = place.unwrap_or_else(|| {
                    flows.push(Flow {
                        label: stage,
                        activations: 0.0,
                        gradients: 0.0,
                    });
                    flows.len() - 1
                });
                flows[place].activations += crossing.bytes;
                flows[place].gradients += crossing.gradient_bytes;
            }
        }
        flows
    }

    /// Numbers of replicas from `fewest` to `most` for a stage before the label.
    fn replicas_to_try(
        &mut self,
        label: usize,
        fewest: usize,
        most: usize,
        sums: &StageSums,
    ) -> Vec<usize> {
        if self.search.given.is_some() {
            return (fewest..=fewest.min(most)).collect();
        }
        let most = most.min(self.search.most_replicas);
        let behind = self.labels[label].devices;
        let fits = |&replicas: &usize| {
            let mut ways = self.search.recompute.ways(sums);
            let depth = 1 + behind.div_ceil(replicas);
            ways.any(|(sums, _)| self.memory(&sums, replicas, depth) <= self.largest_memory)
        };
        let mut tried: Vec<usize> = (fewest..=most)
            .filter(fits)
            .take(self.effort.replicas)
            .collect();
        if let Some(&last) = tried.last()
            && last < most
            && tried.len() == self.effort.replicas
        {
            self.complete = false;
            // Whole servers may keep a ring or a neighbour in one place, and more replicas share what crosses.
            let whole = self.all.iter().copied().max().unwrap_or(1);
            tried.extend((last + 1..=most).filter(|r| r % whole == 0).take(1));
            if *tried.last().unwrap_or(&most) < most {
                tried.push(most);
            }
        }
        tried
    }

    /// Puts a stage with these replicas before the label, on all the devices that are tried.
    fn place(
        &mut self,
        (label, start, limits): (usize, usize, &[Option<usize>]),
        replicas: usize,
        sums: &StageSums,
        flows: &[Flow],
    ) {
        let free = self.labels[label].free.clone();
        let mut ways: Vec<Vec<usize>> = Vec::new();
        if *self.budget == 0 {
            self.complete = false;
            return;
        }
        let mut visit = |counts: &[usize]| ways.push(counts.to_vec());
        if !spread::every(&free, limits, replicas, self.effort.ways, &mut visit) {
            self.complete = false;
            let reader = flows.iter().max_by(|a, b| {
                let bytes = |f: &Flow| f.activations + f.gradients;
                bytes(a).total_cmp(&bytes(b))
            });
            let reader = reader.map(|flow| self.labels[flow.label].counts.as_slice());
            ways = spread::some(&free, &self.all, replicas, reader);
        }
        for counts in ways {
            if *self.budget == 0 {
                self.complete = false;
                return;
            }
            *self.budget = self.budget.saturating_sub(self.size);
            if let Some(longer) = self.longer(label, start, counts, sums, flows) {
                self.at[start].push(self.labels.len());
                self.labels.push(longer);
            }
        }
    }

    /// The label with a stage put before it, if all stays within the threshold and the memory.
    fn longer(
        &self,
        label: usize,
        start: usize,
        counts: Vec<usize>,
        sums: &StageSums,
        flows: &[Flow],
    ) -> Option<Label> {
        let behind = &self.labels[label];
        let fabric = self.search.fabric;
        let replicas: usize = counts.iter().sum();
        let worst = fabric.worst(&counts);
        let depth = 1 + behind.devices.div_ceil(replicas);
        // A stage recomputes only if its memory asks for it.
        let mut ways = self.search.recompute.ways(sums);
        let (sums, recompute) =
            ways.find(|(sums, _)| self.memory(sums, replicas, depth) <= worst.memory)?;
        let loads = worst.loads(&sums, replicas, &self.search.machine);
        if loads.largest() > self.threshold {
            return None;
        }
        let memory = self.memory(&sums, replicas, depth);
        let servers = fabric.by_server(&counts);
        let mut cards = behind.cards.clone();
        add_ring(&mut cards, &servers, sums.parameters, &self.search.machine);
        for flow in flows {
            let to = &self.labels[flow.label].servers;
            let bytes = (flow.activations, flow.gradients);
            add_link(&mut cards, &servers, to, bytes, self.meetings());
        }
        let within = |(card, rate): (&CardBytes, &f64)| card.busier() / rate <= self.threshold;
        if !cards.iter().zip(&fabric.cards).all(within) {
            return None;
        }
        let left = behind.free.iter().zip(&counts);
        Some(Label {
            start,
            behind: Some(label),
            end: behind.start,
            servers,
            recompute,
            free: left.map(|(free, count)| free - count).collect(),
            devices: behind.devices + replicas,
            stages: behind.stages + 1,
            memory: behind.memory.max(memory),
            cards,
            counts,
        })
    }
}
