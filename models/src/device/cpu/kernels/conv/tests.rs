use super::*;
use crate::device::cpu::kernels::testing::{assert_close, on_every_arch, values};
use crate::device::cpu::reference::matrix;
use crate::device::params::Window;

fn check(p: &Conv) {
    check_on(p, 1);
}

fn check_on(p: &Conv, threads: usize) {
    let w = &p.window;
    let area = |extent: [usize; 2]| extent[0] * extent[1];
    let input = values(p.batch * p.in_channels * area(w.input), 1);
    let filter = values(
        p.out_channels * p.in_channels / p.groups * area(w.kernel),
        2,
    );
    let bias = values(p.out_channels, 3);
    let grad = values(p.batch * p.out_channels * area(w.output), 4);

    let (mut actual, mut expected) = (vec![f32::NAN; grad.len()], vec![f32::NAN; grad.len()]);
    forward(p, threads, &input, &filter, Some(&bias), &mut actual);
    matrix::conv(p, &input, &filter, Some(&bias), &mut expected);
    assert_close(&format!("forward {p:?}"), &actual, &expected, 1e-5);

    let (mut actual, mut expected) = (vec![f32::NAN; input.len()], vec![f32::NAN; input.len()]);
    backward_data(p, threads, &filter, &grad, &mut actual);
    matrix::conv_backward_data(p, &filter, &grad, &mut expected);
    assert_close(&format!("backward data {p:?}"), &actual, &expected, 1e-5);

    let (mut actual, mut expected) = (vec![f32::NAN; filter.len()], vec![f32::NAN; filter.len()]);
    backward_filter(p, threads, &input, &grad, &mut actual);
    matrix::conv_backward_filter(p, &input, &grad, &mut expected);
    assert_close(&format!("backward filter {p:?}"), &actual, &expected, 1e-5);
}

#[allow(clippy::too_many_arguments)]
fn conv(
    batch: usize,
    channels: (usize, usize),
    groups: usize,
    input: [usize; 2],
    kernel: [usize; 2],
    strides: [usize; 2],
    dilations: [usize; 2],
    (pads_begin, pads_end): ([usize; 2], [usize; 2]),
) -> Conv {
    let output = [0, 1].map(|i| {
        let reach = dilations[i] * (kernel[i] - 1) + 1;
        (input[i] + pads_begin[i] + pads_end[i] - reach) / strides[i] + 1
    });
    let window = Window {
        input,
        output,
        kernel,
        strides,
        dilations,
        pads_begin,
        pads_end,
    };
    Conv {
        batch,
        in_channels: channels.0,
        out_channels: channels.1,
        groups,
        window,
    }
}

#[test]
fn convolutions_of_all_kinds() {
    on_every_arch(|| {
        let none = ([0, 0], [0, 0]);
        let same = ([1, 1], [1, 1]);
        for p in [
            conv(
                2,
                (1, 6),
                1,
                [28, 28],
                [5, 5],
                [1, 1],
                [1, 1],
                ([2, 2], [2, 2]),
            ),
            conv(3, (6, 16), 1, [14, 14], [5, 5], [1, 1], [1, 1], none),
            conv(1, (64, 12), 1, [9, 11], [3, 3], [1, 1], [1, 1], same),
            conv(7, (3, 5), 1, [7, 7], [3, 3], [1, 1], [1, 1], same),
            conv(2, (5, 9), 1, [8, 6], [1, 1], [1, 1], [1, 1], none),
            conv(2, (5, 9), 1, [8, 7], [1, 1], [2, 2], [1, 1], none),
            conv(
                2,
                (3, 8),
                1,
                [23, 21],
                [7, 7],
                [2, 2],
                [1, 1],
                ([3, 3], [3, 3]),
            ),
            conv(2, (4, 6), 2, [9, 9], [3, 3], [2, 1], [1, 1], same),
            conv(2, (6, 6), 6, [9, 9], [3, 3], [1, 1], [1, 1], same),
            conv(
                1,
                (2, 3),
                1,
                [12, 13],
                [3, 2],
                [1, 1],
                [2, 3],
                ([2, 0], [1, 4]),
            ),
            conv(
                1,
                (2, 3),
                1,
                [5, 5],
                [2, 2],
                [1, 1],
                [1, 1],
                ([3, 3], [2, 2]),
            ),
            conv(
                1,
                (2, 3),
                1,
                [40, 1],
                [3, 1],
                [3, 1],
                [1, 1],
                ([1, 0], [2, 0]),
            ),
            conv(1, (130, 130), 1, [4, 4], [3, 3], [1, 1], [1, 1], same),
            conv(1, (1, 1), 1, [30, 60], [3, 3], [1, 1], [1, 1], same),
        ] {
            check(&p);
        }
    });
}

#[test]
fn threads_divide_the_samples() {
    // Enough work for three threads, whose shares differ.
    let same = ([1, 1], [1, 1]);
    for strides in [[1, 1], [1, 2]] {
        let p = conv(5, (28, 28), 1, [42, 42], [3, 3], strides, [1, 1], same);
        assert_eq!(batches(&p, 3), [0..2, 2..4, 4..5]);
        check_on(&p, 3);
    }
}
