//! Before a run: do all processes run the same program on the same plan?
//!
//! These are the only MPI calls that wait; all processes make them together.

use mpi::collective::CommunicatorCollectives;
use mpi::environment::processor_name;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Root};

/// Longest host name that is told.
const NAME_BYTES: usize = 64;

/// A process that is not like that of rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The first such rank.
    pub rank: usize,
    /// Position of the first thing that differs.
    pub thing: usize,
}

/// Names of the machines that the ranks run on.
pub fn hosts(world: &SimpleCommunicator) -> Vec<String> {
    let own = processor_name().unwrap_or_default();
    let mut name = [0; NAME_BYTES];
    let len = own.len().min(NAME_BYTES);
    name[..len].copy_from_slice(&own.as_bytes()[..len]);
    let mut names = vec![0; NAME_BYTES * world.size() as usize];
    world.all_gather_into(&name[..], &mut names[..]);
    names
        .chunks(NAME_BYTES)
        .map(|name| {
            String::from_utf8_lossy(name)
                .trim_end_matches('\0')
                .to_owned()
        })
        .collect()
}

/// The first rank that is not ready, if there is one.
pub fn all_ready(world: &SimpleCommunicator, ready: bool) -> Result<(), usize> {
    let mut all = vec![0u8; world.size() as usize];
    world.all_gather_into(&u8::from(ready), &mut all[..]);
    all.iter().position(|&ready| ready == 0).map_or(Ok(()), Err)
}

/// Compares texts with those of rank 0, as many on every rank.
///
/// # Errors
/// The first difference; all ranks get the same.
pub fn agree(world: &SimpleCommunicator, things: &[String]) -> Result<(), Difference> {
    let root = world.process_at_rank(0);
    let mut first = things.len();
    for (index, thing) in things.iter().enumerate() {
        let mut len = thing.len() as u64;
        root.broadcast_into(&mut len);
        let mut text = thing.as_bytes().to_vec();
        text.resize(len as usize, 0);
        root.broadcast_into(&mut text[..]);
        if text != thing.as_bytes() {
            first = first.min(index);
        }
    }
    let mut all = vec![0u64; world.size() as usize];
    world.all_gather_into(&(first as u64), &mut all[..]);
    let differing = all
        .iter()
        .position(|&first| (first as usize) < things.len());
    differing.map_or(Ok(()), |rank| {
        Err(Difference {
            rank,
            thing: all[rank] as usize,
        })
    })
}
