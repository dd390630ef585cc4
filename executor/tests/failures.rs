//! A worker that fails ends the run with its own error; nobody waits for it.

mod common;

use std::path::Path;
use std::sync::Arc;

use executor::error::RunError;
use executor::job::prepare;
use executor::train::train;
use executor::worker::WorkerError;
use models::tensor::Tensor;
use planner::schedule::ScheduleKind;

use common::{Losses, job, lenet, mnist, options, plan, shapes};

#[test]
fn what_only_the_planner_can_do_is_refused() {
    let mut plan = plan(&lenet(), 16, &shapes(&[2, 1], 0));
    plan.schedule = ScheduleKind::Interleaved;
    let prepared = prepare(
        Path::new("plan.json"),
        &plan,
        &options(&mnist(), 1),
        Arc::default(),
    );
    let error = prepared.map(|_| ()).unwrap_err().to_string();
    assert!(
        error.starts_with("plan.json: dp-run cannot carry out free pieces"),
        "{error}"
    );
}

#[test]
fn a_panic_in_any_stage_is_an_error_of_the_run() {
    for stage in [0, 1] {
        let plan = plan(&lenet(), 16, &shapes(&[2, 1], 0));
        let mut job = job(&plan, &options(&mnist(), 9));
        // A weight of a wrong shape: the checks that rule it out are passed over here.
        let weight = job.stages[stage].program.weights()[0];
        job.weights[weight] = Tensor::from_f32(&[1], [0.0]);
        match train(&job, &mut Losses::default()) {
            Err(RunError::Worker {
                stage: failed,
                error: WorkerError::Panic(_),
                ..
            }) => assert_eq!(failed, stage),
            other => panic!("{other:?}"),
        }
    }
}
