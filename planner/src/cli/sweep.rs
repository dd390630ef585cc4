//! `dp-plan --sweep`: plans over numbers of devices, bandwidths or both.

use super::{Arguments, CliError};
use crate::file;
use crate::planning::{Axes, csv, grid};
use crate::profile::Profile;
use crate::units::parse_bandwidth;

/// One `--sweep`.
#[derive(Clone, Debug, PartialEq)]
pub enum Sweep {
    /// Numbers of devices.
    Gpus(Vec<usize>),
    /// Bytes per second.
    Bandwidth(Vec<f64>),
}

/// No axis has more steps than this; where both are swept, the devices have no more than [`MOST_IN_GRID`].
const MOST_STEPS: usize = 64;
const MOST_IN_GRID: usize = 16;
const SYNTAX: &str =
    "write gpus=FIRST..LAST or bw=FIRST..LAST, for example gpus=1..64 or bw=1Gbps..100Gbps";

/// `gpus=1..64` or `bw=1Gbps..100Gbps`.
pub(super) fn parse(text: &str) -> Result<Sweep, String> {
    let (name, range) = text.split_once('=').ok_or(SYNTAX)?;
    let (first, last) = range.split_once("..").ok_or(SYNTAX)?;
    match name.trim() {
        "gpus" => {
            let (first, last) = (super::parse_count(first)?, super::parse_count(last)?);
            if first > last {
                return Err(format!("{first} is more than {last}: {SYNTAX}"));
            }
            Ok(Sweep::Gpus((first..=last).collect()))
        }
        "bw" => {
            let parse = |text: &str| parse_bandwidth(text).map_err(|error| error.to_string());
            let (slow, fast) = (parse(first)?, parse(last)?);
            if slow > fast {
                return Err(format!("{first} is more than {last}: {SYNTAX}"));
            }
            Ok(Sweep::Bandwidth(bandwidths(slow, fast)))
        }
        other => Err(format!("`{other}` cannot be swept: {SYNTAX}")),
    }
}

/// Both ends, and between them the steps 1, 2, 5 of every decade as links are quoted, in bits.
fn bandwidths(slow: f64, fast: f64) -> Vec<f64> {
    let decades = (slow * 8.0).log10().floor() as i32..=(fast * 8.0).log10().ceil() as i32;
    let steps = decades.flat_map(|d| [1.0, 2.0, 5.0].map(|s| s * 10f64.powi(d) / 8.0));
    // Neither a step that is one of the ends up to rounding.
    let between = steps.filter(|&s| s > slow * 1.001 && s < fast * 0.999);
    let mut all: Vec<f64> = std::iter::once(slow).chain(between).chain([fast]).collect();
    all.dedup();
    thinned(&all, MOST_STEPS)
}

/// At most `most` of the values, evenly spread, the first and the last among them.
fn thinned<T: Clone>(values: &[T], most: usize) -> Vec<T> {
    let last = values.len() - 1;
    let steps = last.min(most - 1).max(1);
    let mut places: Vec<usize> = (0..=steps).map(|i| i * last / steps).collect();
    places.dedup();
    places
        .into_iter()
        .map(|place| values[place].clone())
        .collect()
}

fn axes(arguments: &Arguments) -> Result<Axes, CliError> {
    let mut axes = Axes::default();
    for sweep in &arguments.sweep {
        let twice = match sweep {
            Sweep::Gpus(devices) => {
                !std::mem::replace(&mut axes.devices, thinned(devices, MOST_STEPS)).is_empty()
            }
            Sweep::Bandwidth(bandwidths) => {
                !std::mem::replace(&mut axes.bandwidths, bandwidths.clone()).is_empty()
            }
        };
        if twice {
            return Err(CliError::Usage(
                "--sweep: the same axis stands there twice".to_owned(),
            ));
        }
    }
    if axes.devices.is_empty() && arguments.gpus.is_none() {
        return Err(CliError::Usage(
            "--gpus is missing: give it, or sweep it too".to_owned(),
        ));
    }
    if axes.bandwidths.is_empty() && arguments.bw.is_none() {
        return Err(CliError::Usage(
            "--bw is missing: give it, or sweep it too".to_owned(),
        ));
    }
    if !axes.devices.is_empty() && arguments.gpus.is_some() {
        return Err(CliError::Usage(
            "--gpus and --sweep gpus=...: give one of them".to_owned(),
        ));
    }
    if !axes.bandwidths.is_empty() && arguments.bw.is_some() {
        return Err(CliError::Usage(
            "--bw and --sweep bw=...: give one of them".to_owned(),
        ));
    }
    if !axes.devices.is_empty() && !axes.bandwidths.is_empty() {
        axes.devices = thinned(&axes.devices, MOST_IN_GRID);
    }
    Ok(axes)
}

/// Plans for every combination, prints or writes the table, draws it.
pub(super) fn run(arguments: &Arguments, profile: &Profile) -> Result<(), CliError> {
    let axes = axes(arguments)?;
    let request = arguments.request()?;
    let cells = grid(profile, &request, &axes)?;
    #[cfg(feature = "plot")]
    if let Some(path) = &arguments.plot {
        pictures::draw(path, &request, profile, &axes, &cells)?;
    }
    let text = if arguments.json {
        file::to_json(&cells)
    } else {
        csv(&cells)
    };
    match &arguments.output {
        Some(path) => Ok(file::write_atomically(path, text.as_bytes())?),
        None if arguments.quiet && !arguments.json => Ok(()),
        None => Ok(file::print(&text)?),
    }
}

#[cfg(feature = "plot")]
mod pictures {
    use std::path::{Path, PathBuf};

    use crate::planning::{Axes, Cell, Request};
    use crate::plot::{HeatMap, Lines, Picture, PlotError, Series};
    use crate::profile::Profile;
    use crate::units::show_bandwidth;

    /// Speed-up over both axes, or throughput, memory and communication over one.
    pub(super) fn draw(
        path: &Path,
        request: &Request,
        profile: &Profile,
        axes: &Axes,
        cells: &[Cell],
    ) -> Result<(), PlotError> {
        let stem = Path::new(&profile.model.file).file_stem();
        let model = stem.map_or_else(|| "model".into(), |stem| stem.to_string_lossy());
        let batch = profile.batch_size;
        if !axes.devices.is_empty() && !axes.bandwidths.is_empty() {
            return Picture::HeatMap(&HeatMap {
                title: format!("{model}: speed-up of the plan over data parallel"),
                subtitle: format!("batch {batch} per worker"),
                x_label: "workers",
                y_label: "link of each worker",
                columns: axes.devices.iter().map(ToString::to_string).collect(),
                rows: axes.bandwidths.iter().map(|&b| show_bandwidth(b)).collect(),
                values: cells
                    .chunks(axes.devices.len())
                    .map(|row| row.iter().map(|c| c.speedup_over_data_parallel).collect())
                    .collect(),
            })
            .write(path);
        }
        let over_devices = axes.bandwidths.is_empty();
        let subtitle = if !over_devices {
            format!(
                "batch {batch} per worker, {} workers",
                request.cluster.devices
            )
        } else if request.cluster.local {
            format!("batch {batch} per worker, in one process")
        } else {
            let link = request.cluster.bandwidth_bytes_per_s;
            format!("batch {batch} per worker, {} links", show_bandwidth(link))
        };
        let x = |c: &Cell| {
            if over_devices {
                (c.devices as f64, c.devices.to_string())
            } else {
                let bits = c.bandwidth_bytes_per_s;
                (bits, show_bandwidth(bits))
            }
        };
        let series = |name, value: fn(&Cell) -> Option<f64>| Series {
            name,
            values: cells.iter().map(value).collect(),
        };
        let lines = |what: &str, y_label, series| Lines {
            title: format!("{model}: {what}"),
            subtitle: subtitle.clone(),
            x_label: if over_devices {
                "workers"
            } else {
                "link of each worker"
            },
            y_label,
            x: cells.iter().map(x).collect(),
            logarithmic: !over_devices,
            series,
        };
        let throughput = vec![
            series("pipeline plan", |c| c.plan_samples_per_s),
            series("data parallel", |c| c.data_parallel_samples_per_s),
            series("straight pipeline", |c| c.straight_samples_per_s),
            series("model parallel", |c| c.model_parallel_samples_per_s),
        ];
        let memory = vec![series("pipeline plan", |c| {
            Some(c.memory_bytes? as f64 / GIB)
        })];
        let communication = vec![
            series("pipeline plan", |c| Some(c.bytes_per_sample? / MIB)),
            series("data parallel", |c| {
                Some(c.data_parallel_bytes_per_sample? / MIB)
            }),
        ];
        for (suffix, picture) in [
            ("", lines("throughput", "samples per second", throughput)),
            (
                "-memory",
                lines("memory of the fullest worker", "GiB", memory),
            ),
            (
                "-communication",
                lines(
                    "communication of each sample",
                    "MiB between workers",
                    communication,
                ),
            ),
        ] {
            Picture::Lines(&picture).write(&with_suffix(path, suffix))?;
        }
        Ok(())
    }

    /// `folder/name-suffix.ext` for `folder/name.ext`.
    fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
        let mut name = path.file_stem().unwrap_or_default().to_owned();
        name.push(suffix);
        if let Some(extension) = path.extension() {
            name.push(".");
            name.push(extension);
        }
        path.with_file_name(name)
    }

    const MIB: f64 = 1024.0 * 1024.0;
    const GIB: f64 = 1024.0 * MIB;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_as_people_write_them() {
        assert_eq!(parse("gpus=2..4"), Ok(Sweep::Gpus(vec![2, 3, 4])));
        let Ok(Sweep::Bandwidth(steps)) = parse("bw=1Gbps..40Gbps") else {
            panic!("no range of bandwidths");
        };
        let gigabits: Vec<f64> = steps.iter().map(|s| (s * 8e-9).round()).collect();
        assert_eq!(gigabits, [1.0, 2.0, 5.0, 10.0, 20.0, 40.0]);
        assert_eq!(
            parse("bw=10Gbps..10Gbps"),
            Ok(Sweep::Bandwidth(vec![1.25e9]))
        );
        for wrong in [
            "gpus",
            "gpus=4",
            "gpus=4..2",
            "gpus=0..2",
            "bw=1..2",
            "memory=1GB..2GB",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn thinning_keeps_both_ends() {
        let many: Vec<usize> = (1..=1000).collect();
        let few = thinned(&many, 16);
        assert_eq!((few.len(), few[0], few[15]), (16, 1, 1000));
        assert_eq!(thinned(&[7], 16), [7]);
        assert_eq!(thinned(&[1, 2], 16), [1, 2]);
    }
}
