//! Ways to put the replicas of a stage on what is free.

/// Calls `visit` with every way to put `replicas` on `free` devices of each slot. False if there are more than `most`.
///
/// Where `no_more_than` names an earlier slot for a slot, ways with more replicas on the slot than on that one are left
/// out.
pub fn every(
    free: &[usize],
    no_more_than: &[Option<usize>],
    replicas: usize,
    most: usize,
    visit: &mut impl FnMut(&[usize]),
) -> bool {
    if ways(free, replicas).is_none_or(|ways| ways > most) {
        return false;
    }
    let mut behind: Vec<usize> = vec![0; free.len() + 1];
    for slot in (0..free.len()).rev() {
        behind[slot] = behind[slot + 1] + free[slot];
    }
    let mut fill = Fill {
        free,
        no_more_than,
        behind: &behind,
        counts: vec![0; free.len()],
    };
    fill.from(0, replicas, visit);
    true
}

/// Number of ways, none if it is beyond counting.
fn ways(free: &[usize], replicas: usize) -> Option<usize> {
    let mut ways = vec![0usize; replicas + 1];
    ways[0] = 1;
    for &slot in free {
        for sum in (1..=replicas).rev() {
            for fewer in sum - slot.min(sum)..sum {
                ways[sum] = ways[sum].checked_add(ways[fewer])?;
            }
        }
    }
    Some(ways[replicas])
}

struct Fill<'a> {
    free: &'a [usize],
    no_more_than: &'a [Option<usize>],
    /// Free devices from each slot on.
    behind: &'a [usize],
    counts: Vec<usize>,
}

impl Fill<'_> {
    /// Puts the replicas that are left on the slots from `slot` on.
    fn from(&mut self, slot: usize, left: usize, visit: &mut impl FnMut(&[usize])) {
        if slot == self.free.len() {
            visit(&self.counts);
            return;
        }
        let most = self.no_more_than[slot].map_or(left, |other| left.min(self.counts[other]));
        let least = left.saturating_sub(self.behind[slot + 1]);
        for count in least..=most.min(self.free[slot]) {
            self.counts[slot] = count;
            self.from(slot + 1, left - count, visit);
        }
    }
}

/// The ways that are tried where there are too many to try all: packed behind what is already there, on untouched slots
/// first, on the tightest slot, spread evenly, and along the replicas of the stage that reads most from this one.
pub fn some(
    free: &[usize],
    all: &[usize],
    replicas: usize,
    reader: Option<&[usize]>,
) -> Vec<Vec<usize>> {
    let slots = free.len();
    let last_first = (0..slots).rev();
    let mut orders: Vec<Vec<usize>> = vec![last_first.clone().collect()];
    let untouched = |slot: &usize| free[*slot] == all[*slot];
    let mut order: Vec<usize> = last_first.clone().filter(untouched).collect();
    order.extend(last_first.clone().filter(|slot| !untouched(slot)));
    orders.push(order);
    let mut order: Vec<usize> = last_first.collect();
    order.sort_by_key(|&slot| (free[slot] < replicas, free[slot]));
    orders.push(order);
    if let Some(reader) = reader {
        let mut order: Vec<usize> = (0..slots).rev().collect();
        order.sort_by_key(|&slot| std::cmp::Reverse(reader[slot]));
        orders.push(order);
    }
    let mut found: Vec<Vec<usize>> = Vec::new();
    let mut add = |counts: Option<Vec<usize>>| {
        if let Some(counts) = counts
            && !found.contains(&counts)
        {
            found.push(counts);
        }
    };
    for order in &orders {
        add(take(free, order, replicas, vec![0; slots]));
    }
    add(evenly(free, replicas));
    if let Some(reader) = reader {
        let all: usize = reader.iter().sum();
        let along: Vec<usize> = reader
            .iter()
            .zip(free)
            .map(|(&n, &free)| (n * replicas / all).min(free))
            .collect();
        add(take(free, &orders[0], replicas, along));
    }
    found
}

/// Adds to `counts` in the order of slots until there are `replicas`.
fn take(
    free: &[usize],
    order: &[usize],
    replicas: usize,
    mut counts: Vec<usize>,
) -> Option<Vec<usize>> {
    let mut left = replicas - counts.iter().sum::<usize>();
    for &slot in order {
        let more = left.min(free[slot] - counts[slot]);
        counts[slot] += more;
        left -= more;
    }
    (left == 0).then_some(counts)
}

/// As many on each slot as there is room for, the difference between slots as small as that allows.
fn evenly(free: &[usize], replicas: usize) -> Option<Vec<usize>> {
    let mut left = replicas;
    let mut counts = vec![0; free.len()];
    let mut open: Vec<usize> = (0..free.len()).filter(|&slot| free[slot] > 0).collect();
    while left > 0 && !open.is_empty() {
        let share = (left / open.len()).max(1);
        for &slot in open.iter().rev() {
            let more = share.min(left).min(free[slot] - counts[slot]);
            counts[slot] += more;
            left -= more;
        }
        open.retain(|&slot| counts[slot] < free[slot]);
    }
    (left == 0).then_some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_visited_once() {
        let mut found = Vec::new();
        let any = [None; 3];
        let mut visit = |counts: &[usize]| found.push(counts.to_vec());
        assert!(every(&[2, 0, 1], &any, 2, 9, &mut visit));
        assert!(every(&[2, 2, 1], &[None, Some(0), None], 2, 9, &mut visit));
        assert!(!every(&[9, 9, 9], &any, 9, 20, &mut |_| ()));
        let pairs = [[1, 0, 1], [2, 0, 0]];
        assert_eq!(found[..2], pairs);
        assert_eq!(found[2..], [[1, 0, 1], [1, 1, 0], [2, 0, 0]]);
    }

    #[test]
    fn the_tried_ways_fit_and_differ() {
        let (free, all) = ([4, 1, 3], [4, 4, 4]);
        let found = some(&free, &all, 5, Some(&[0, 3, 1]));
        for counts in &found {
            assert_eq!(counts.iter().sum::<usize>(), 5);
            assert!(counts.iter().zip(&free).all(|(n, free)| n <= free));
        }
        assert!(found.contains(&vec![1, 1, 3]) && found.contains(&vec![4, 0, 1]));
        assert!(some(&free, &all, 9, None).is_empty());
    }
}
