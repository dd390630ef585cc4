//! Which labels can be dropped, and which servers are alike.

use std::collections::HashMap;

use super::labels::{Label, Run, Servers};

/// Servers before one that are looked at for one that is alike.
const NEAREST: usize = 16;

/// A label and its servers in the order in which it is compared with others.
struct Kept {
    label: usize,
    order: Vec<usize>,
}

impl Run<'_, '_> {
    /// Labels at the place without those that another one is no worse than, each with the labels of the stages that
    /// read the tensors which leave the place.
    pub(super) fn undominated(&mut self, place: usize) -> Vec<(usize, Vec<Vec<usize>>)> {
        let labels = self.smallest_first(place);
        // Labels that send to the same replicas.
        let mut alike: HashMap<Vec<usize>, Vec<Kept>> = HashMap::new();
        let mut kept = Vec::new();
        for label in labels {
            let receivers = self.receivers(label);
            let (sends, order) = self.sends(label, &receivers);
            let others = alike.entry(sends).or_default();
            // Comparing is work too, though less than trying.
            *self.budget = self.budget.saturating_sub(others.len() * self.size / 16);
            let new = Kept { label, order };
            if others.iter().any(|other| self.no_worse(other, &new)) {
                continue;
            }
            if kept.len() == self.effort.labels {
                self.complete = false;
                break;
            }
            others.push(new);
            kept.push((label, receivers));
        }
        kept
    }

    /// Labels that begin at the place: fewest devices first, then fewest stages, then the least full cards.
    fn smallest_first(&mut self, place: usize) -> Vec<usize> {
        let cards = |label: &Label| -> (f64, f64) {
            let cards = label.cards.iter().zip(&self.search.fabric.cards);
            let seconds = cards.map(|(card, rate)| card.busier() / rate);
            seconds.fold((0.0, 0.0), |(most, all), s| (s.max(most), all + s))
        };
        let mut keyed: Vec<_> = std::mem::take(&mut self.at[place])
            .into_iter()
            .map(|number| {
                let label = &self.labels[number];
                ((label.devices, label.stages), cards(label), number)
            })
            .collect();
        keyed.sort_by(|(size_a, a, _), (size_b, b, _)| {
            let sizes = size_a.cmp(size_b);
            sizes.then(a.0.total_cmp(&b.0)).then(a.1.total_cmp(&b.1))
        });
        keyed.into_iter().map(|(_, _, number)| number).collect()
    }

    /// What a label sends to, server by server, and the order of servers in which that is told: their own, or one that
    /// is the same for labels which differ only in the numbers of servers that are alike.
    fn sends(&self, label: usize, receivers: &[Vec<usize>]) -> (Vec<usize>, Vec<usize>) {
        let stages: Vec<usize> = receivers.iter().flatten().copied().collect();
        // Which tensor goes to which of these stages, whatever the server.
        let place = |stage: &usize| stages.iter().position(|s| s == stage).unwrap_or(0);
        let tensors = receivers.iter();
        let mut key: Vec<usize> = tensors
            .flat_map(|readers| readers.iter().map(place).chain([usize::MAX]))
            .collect();
        let column = |server: usize| {
            let counts = stages.iter().flat_map(move |&stage| {
                let slots = self.slots_of[server].clone();
                slots.map(move |slot| self.labels[stage].counts[slot])
            });
            std::iter::once(self.class_of[server]).chain(counts)
        };
        let label = &self.labels[label];
        let mut order: Vec<usize> = (0..self.slots_of.len()).collect();
        if self.effort.servers != Servers::Each {
            order.sort_by(|&a, &b| {
                let free = |server: usize| &label.free[self.slots_of[server].clone()];
                let card = |server: usize| label.cards[server].busier();
                let columns = column(a).cmp(column(b));
                let free = columns.then_with(|| free(a).cmp(free(b)));
                free.then_with(|| card(b).total_cmp(&card(a)))
            });
        }
        key.extend(order.iter().flat_map(|&server| column(server)));
        (key, order)
    }

    /// Whether a label uses no device more and loads no card more than another one.
    fn no_worse(&self, a: &Kept, b: &Kept) -> bool {
        let (first, second) = (&self.labels[a.label], &self.labels[b.label]);
        a.order.iter().zip(&b.order).all(|(&v, &w)| {
            let (card, other) = (&first.cards[v], &second.cards[w]);
            let mut slots = self.slots_of[v].clone().zip(self.slots_of[w].clone());
            card.out <= other.out
                && card.into <= other.into
                && slots.all(|(x, y)| first.free[x] >= second.free[y])
        })
    }

    /// For each slot the one before it that it may have no more replicas than, where servers are alike so far.
    pub(super) fn no_more_than(
        &self,
        label: usize,
        receivers: &[Vec<usize>],
    ) -> Vec<Option<usize>> {
        let mut limits = vec![None; self.all.len()];
        if self.effort.servers == Servers::Each {
            return limits;
        }
        let label = &self.labels[label];
        for w in 1..self.slots_of.len() {
            // Of several kinds of devices in a server no order is the natural one.
            if self.slots_of[w].len() != 1 {
                continue;
            }
            let y = self.slots_of[w].start;
            let same = |&v: &usize| {
                let x = self.slots_of[v].start;
                let mut stages = receivers.iter().flatten();
                self.class_of[v] == self.class_of[w]
                    && label.free[x] == label.free[y]
                    && label.cards[v] == label.cards[w]
                    && stages.all(|&s| self.labels[s].counts[x] == self.labels[s].counts[y])
            };
            let before = (0..w).rev().take(NEAREST).find(same);
            limits[y] = before.map(|v| self.slots_of[v].start);
        }
        limits
    }
}
