//! What communication takes from the core of a CPU worker (kappa of the cost model).

use std::time::Instant;

use models::device::Device;
use models::device::params::Binary;

use crate::statistics::Summary;

/// Floats per message: large enough to come from memory, as another worker's message does.
const ELEMENTS: usize = 8 << 20;
const ROUNDS: usize = 9;

/// Seconds of the worker's own core per byte that it receives and adds to what it has, as an all-reduce
/// does. Copying a byte into or out of a message takes no more. 0 for devices other than the CPU, whose
/// communication runs beside their compute.
pub fn seconds_per_byte(device: &dyn Device) -> f64 {
    if device.name() != "cpu" {
        return 0.0;
    }
    let received = device.fill(&[ELEMENTS], 1.0);
    let mut sum = device.fill(&[ELEMENTS], 0.0);
    let mut samples = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        sum = device.binary(Binary::Add, sum, received.clone());
        samples.push(start.elapsed().as_secs_f64() / received.bytes() as f64);
    }
    Summary::of(&samples).median
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_takes_some_time_but_less_than_a_microsecond() {
        let device = models::device::open("cpu", 1).unwrap();
        let kappa = seconds_per_byte(&*device);
        assert!(kappa > 0.0 && kappa < 1e-6, "{kappa}");
    }
}
