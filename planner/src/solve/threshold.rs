//! The exact dynamic program: for a bottleneck T, the fewest devices that keep every load within T.
//!
//! Fix T. Let D(i) be the fewest devices on which layers i.. run with every load at most T and every worker within
//! its memory. Then D(i) = min over the end j of the next stage of D(j) + r(i, j, D(j)), where r is the fewest
//! replicas that stage i..j needs. Taking the suffix with the fewest devices is never wrong: the stage's depth, and so
//! its memory, grows with the devices behind it. The loads fall with r from r = 2 on (r = 1 needs no all-reduce and is
//! tried by itself; SOSP 2019's all-reduce, and that of stages which all step together, rises and bounds r from
//! above), and so does the memory, whether the stage recomputes or not, so that r is found by bisection: a stage
//! recomputes if only then that few replicas suffice. One decision takes O(layers^2 log devices), whatever the number of devices; the smallest T with D(0) <= N is found by bisection and
//! then walked down from one plan's bottleneck to the next until no smaller one exists: the result is exact.

use super::{Problem, Recompute, Solution};
use crate::cost::{Partition, StageSums};

/// The best way to run the layers from some layer on.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Suffix {
    devices: usize,
    stages: usize,
    /// Bytes of the fullest worker.
    memory: f64,
    /// End of its first stage, that stage's replicas, and whether it recomputes.
    end: usize,
    replicas: usize,
    recompute: bool,
}

impl Suffix {
    fn key(&self) -> (usize, usize, f64) {
        (self.devices, self.stages, self.memory)
    }
}

/// Multiples of the work bound from which the search begins if they are possible. The closer to the bound, the fewer
/// starts are looked at.
const BEGINNINGS: [f64; 2] = [1.0 + 1.0 / 64.0, 1.25];

/// The smallest bottleneck; ties go to the fewest devices, then the fewest stages, then the least memory.
///
/// None if no partition fits the memory.
#[must_use]
pub fn solve(problem: &Problem) -> Option<Solution> {
    // Below `low` nothing is possible.
    let mut low = problem.work_bound();
    let beginnings = BEGINNINGS.map(|multiple| low * multiple);
    let mut beginnings = beginnings.into_iter().chain([f64::INFINITY]);
    let mut best = beginnings.find_map(|threshold| {
        let found = decide(problem, threshold, problem.memory);
        if found.is_none() {
            low = threshold;
        }
        found
    })?;
    while best.bottleneck > low * (1.0 + 1e-6) {
        let middle = f64::midpoint(low, best.bottleneck);
        match decide(problem, middle, problem.memory) {
            Some(better) => best = better,
            None => low = middle,
        }
    }
    while let Some(better) = decide(problem, best.bottleneck.next_down(), problem.memory) {
        best = better;
    }
    decide(problem, best.bottleneck, problem.memory)
}

/// What the fullest worker needs in the partition that needs least.
#[derive(Clone, Debug, PartialEq)]
pub struct LeastMemory {
    /// Bytes of the fullest worker.
    pub bytes: f64,
    /// The partition.
    pub partition: Partition,
    /// Its stage with the fullest worker.
    pub stage: usize,
}

/// The smallest memory limit at which any partition fits, whatever its speed.
#[must_use]
pub fn least_memory(problem: &Problem) -> LeastMemory {
    let whole = |memory| decide(problem, f64::INFINITY, memory);
    // One stage on one device always fits an infinite memory.
    let mut best = fullest(
        problem,
        trivial(problem.layers(), problem.recompute == Recompute::Always),
    );
    let mut low = 0.0;
    while best.bytes > low * (1.0 + 1e-6) {
        let middle = f64::midpoint(low, best.bytes);
        match whole(middle) {
            Some(found) => best = fullest(problem, found.partition),
            None => low = middle,
        }
    }
    while let Some(found) = whole(best.bytes.next_down()) {
        best = fullest(problem, found.partition);
    }
    best
}

fn trivial(layers: usize, recompute: bool) -> Partition {
    let mut partition = Partition::new(std::iter::once(0..layers).collect(), vec![1]);
    partition.recompute = vec![recompute];
    partition
}

fn fullest(problem: &Problem, partition: Partition) -> LeastMemory {
    let mut behind = 0;
    let mut most = (0.0, 0);
    for (stage, &replicas) in partition.replicas.iter().enumerate().rev() {
        let bytes = problem.memory_of(&problem.stage(&partition, stage), replicas, behind);
        if bytes > most.0 {
            most = (bytes, stage);
        }
        behind += replicas;
    }
    LeastMemory {
        bytes: most.0,
        stage: most.1,
        partition,
    }
}

/// The partition with the fewest devices whose loads stay within `threshold`; none if it takes too many.
fn decide(problem: &Problem, threshold: f64, memory: f64) -> Option<Solution> {
    let layers = problem.layers();
    let around = Around::new(problem, threshold);
    let mut suffixes: Vec<Option<Suffix>> = vec![None; layers + 1];
    suffixes[layers] = Some(Suffix {
        devices: 0,
        stages: 0,
        memory: 0.0,
        end: layers,
        replicas: 0,
        recompute: false,
    });
    for start in (0..layers).rev() {
        // Devices that the layers before leave.
        let left = problem.devices.saturating_sub(around.before(start));
        if around.behind(start) > left {
            continue;
        }
        let mut best: Option<Suffix> = None;
        for (end, sums) in problem.table.stages_from(start) {
            let rest = &suffixes[end];
            let at_least = replicas_for(problem.formula.work(sums, &problem.machine), threshold);
            if at_least > problem.most_replicas {
                // A longer stage has more work: once it fits no number of replicas, none longer does.
                if problem.table.is_nested() {
                    break;
                }
                continue;
            }
            let Some(rest) = rest else { continue };
            let allowed = best.map_or(left, |b| b.devices);
            if rest.devices + at_least > allowed {
                continue;
            }
            let room = (allowed - rest.devices).min(problem.most_replicas);
            let has_room = |sums: &StageSums, replicas| {
                memory == f64::INFINITY || problem.memory_of(sums, replicas, rest.devices) <= memory
            };
            // Whether it has to recompute, if it fits at all. What is too slow without is too slow with it.
            let fitting = |replicas| {
                if problem.recompute != Recompute::Always {
                    if problem.load_of(sums, replicas) > threshold {
                        return None;
                    }
                    if has_room(sums, replicas) {
                        return Some(false);
                    }
                }
                if problem.recompute == Recompute::Never {
                    return None;
                }
                let again = sums.recomputing();
                let fits =
                    problem.load_of(&again, replicas) <= threshold && has_room(&again, replicas);
                fits.then_some(true)
            };
            let fits = |replicas| fitting(replicas).is_some();
            let admits = |r| problem.formula.admits(sums, r, threshold, &problem.machine);
            let Some(replicas) = fewest(at_least, most(room, admits), fits) else {
                continue;
            };
            let Some(recompute) = fitting(replicas) else {
                continue;
            };
            let own = if recompute {
                problem.memory_of(&sums.recomputing(), replicas, rest.devices)
            } else {
                problem.memory_of(sums, replicas, rest.devices)
            };
            let candidate = Suffix {
                devices: rest.devices + replicas,
                stages: rest.stages + 1,
                memory: rest.memory.max(own),
                end,
                replicas,
                recompute,
            };
            if best.is_none_or(|b| candidate.key() < b.key()) {
                best = Some(candidate);
            }
        }
        suffixes[start] = best;
    }
    trace(problem, &suffixes)
}

/// Devices that the work before and behind each place takes at least, however it is cut into stages.
///
/// A place where both together are more than there are begins no stage. The closer the threshold is to the work bound,
/// the fewer places are left: those where the work before fills whole devices.
struct Around {
    threshold: f64,
    /// Seconds of work before each place, and behind it; empty where that is not known.
    before: Vec<f64>,
    behind: Vec<f64>,
}

impl Around {
    fn new(problem: &Problem, threshold: f64) -> Self {
        let alone = problem.table.alone().into_iter().flatten();
        let work = |sums| problem.formula.work(&sums, &problem.machine);
        let works: Vec<f64> = alone.map(work).collect();
        let (mut before, mut behind) = (works.clone(), works);
        let mut sum = 0.0;
        for work in &mut before {
            sum += std::mem::replace(work, sum);
        }
        let mut sum = 0.0;
        for work in behind.iter_mut().rev() {
            sum += *work;
            *work = sum;
        }
        Self {
            threshold,
            before,
            behind,
        }
    }

    fn devices(&self, work: Option<&f64>) -> usize {
        work.map_or(0, |&work| {
            if work > 0.0 {
                replicas_for(work, self.threshold)
            } else {
                0
            }
        })
    }

    fn before(&self, place: usize) -> usize {
        self.devices(self.before.get(place))
    }

    fn behind(&self, place: usize) -> usize {
        self.devices(self.behind.get(place))
    }
}

/// Replicas below which the work alone exceeds the threshold. Never one too many, despite rounding.
fn replicas_for(work: f64, threshold: f64) -> usize {
    if work <= threshold {
        return 1;
    }
    // Saturates for a threshold of zero, which is more than any cluster has.
    let exact = (work / threshold * (1.0 - 1e-9)).ceil() as usize;
    exact.max(1)
}

/// The smallest r in `from..=to` that fits, given that fitting is monotone from 2 on.
fn fewest(from: usize, to: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    if from > to {
        return None;
    }
    if fits(from) {
        return Some(from);
    }
    let (mut low, mut high) = (from.max(2), to);
    if low > high || !fits(high) {
        return None;
    }
    // `high` fits.
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

/// The largest r in `1..=to` that is admitted, given that 1 is and that admission ends once and for all.
fn most(to: usize, admits: impl Fn(usize) -> bool) -> usize {
    if admits(to) {
        return to;
    }
    let (mut low, mut high) = (1, to);
    while low + 1 < high {
        let middle = usize::midpoint(low, high);
        if admits(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

fn trace(problem: &Problem, suffixes: &[Option<Suffix>]) -> Option<Solution> {
    let mut partition = Partition::new(Vec::new(), Vec::new());
    let mut bottleneck = 0.0f64;
    let mut start = 0;
    while start < problem.layers() {
        let suffix = suffixes[start]?;
        partition.stages.push(start..suffix.end);
        partition.replicas.push(suffix.replicas);
        partition.recompute.push(suffix.recompute);
        let sums = problem.stage(&partition, partition.stages.len() - 1);
        bottleneck = bottleneck.max(problem.load_of(&sums, suffix.replicas));
        start = suffix.end;
    }
    Some(Solution {
        partition,
        bottleneck,
    })
}
