//! The profile for people (a table) and for spreadsheets (CSV).

use std::fmt::Write as _;
use std::io;

use planner::Profile;
use planner::profile::LayerProfile;

/// A table of all layers with their share of the step, and how their sum compares with the whole step.
pub fn table(profile: &Profile) -> String {
    let rows: Vec<[String; 8]> = profile.layers.iter().map(|l| row(profile, l)).collect();
    let header = [
        "layer", "kind", "forward", "backward", "step", "share", "weights", "stash",
    ]
    .map(String::from);
    let total = total_row(profile);
    let widths: Vec<usize> = (0..header.len())
        .map(|c| {
            let cells = rows.iter().chain([&header, &total]);
            cells.map(|r| r[c].chars().count()).max().unwrap_or(0)
        })
        .collect();

    let mut text = format!(
        "{}, batch {}, {}, {} thread{}\n\n",
        profile.model.file,
        profile.batch_size,
        profile.device,
        profile.threads,
        if profile.threads == 1 { "" } else { "s" }
    );
    let mut line = |cells: &[String; 8]| {
        for (column, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
            // Words to the left, numbers to the right.
            let _ = match column {
                0 | 1 => write!(text, "  {cell:<width$}"),
                _ => write!(text, "  {cell:>width$}"),
            };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    };
    line(&header);
    rows.iter().for_each(&mut line);
    line(&total);
    if let Some(whole) = profile.whole_step_ms {
        let sum = sum_of_layers_ms(profile);
        let _ = write!(
            text,
            "\nwhole step {} ({:.1} samples/s); the layers sum to {} ({:+.1} %)\n",
            milliseconds(whole),
            profile.batch_size as f64 / whole * 1e3,
            milliseconds(sum),
            (sum / whole - 1.0) * 100.0
        );
    }
    text
}

/// Forward, backward and optimizer step of all layers, milliseconds per minibatch.
pub fn sum_of_layers_ms(profile: &Profile) -> f64 {
    profile.layers.iter().map(layer_ms).sum()
}

fn layer_ms(layer: &LayerProfile) -> f64 {
    layer.forward_ms + layer.backward_ms + layer.step_ms
}

fn row(profile: &Profile, layer: &LayerProfile) -> [String; 8] {
    [
        layer.name.clone(),
        layer.kind.clone(),
        milliseconds(layer.forward_ms),
        milliseconds(layer.backward_ms),
        milliseconds(layer.step_ms),
        format!(
            "{:.1} %",
            100.0 * layer_ms(layer) / sum_of_layers_ms(profile).max(f64::MIN_POSITIVE)
        ),
        bytes(layer.parameter_bytes),
        bytes(layer.stash_bytes),
    ]
}

fn total_row(profile: &Profile) -> [String; 8] {
    let layers = &profile.layers;
    [
        format!("{} layers", layers.len()),
        String::new(),
        milliseconds(layers.iter().map(|l| l.forward_ms).sum()),
        milliseconds(layers.iter().map(|l| l.backward_ms).sum()),
        milliseconds(layers.iter().map(|l| l.step_ms).sum()),
        String::new(),
        bytes(layers.iter().map(|l| l.parameter_bytes).sum()),
        bytes(layers.iter().map(|l| l.stash_bytes).sum()),
    ]
}

/// One line per layer, times in milliseconds and sizes in bytes; `output_bytes` counts each tensor once.
pub fn write_csv(profile: &Profile, out: impl io::Write) -> csv::Result<()> {
    let mut writer = csv::Writer::from_writer(out);
    writer.write_record([
        "name",
        "kind",
        "forward_ms",
        "forward_mad_ms",
        "backward_ms",
        "backward_mad_ms",
        "step_ms",
        "step_mad_ms",
        "parameter_bytes",
        "stash_bytes",
        "output_bytes",
    ])?;
    for layer in &profile.layers {
        writer.write_record([
            layer.name.clone(),
            layer.kind.clone(),
            layer.forward_ms.to_string(),
            layer.forward_mad_ms.to_string(),
            layer.backward_ms.to_string(),
            layer.backward_mad_ms.to_string(),
            layer.step_ms.to_string(),
            layer.step_mad_ms.to_string(),
            layer.parameter_bytes.to_string(),
            layer.stash_bytes.to_string(),
            output_bytes(profile, &layer.name).to_string(),
        ])?;
    }
    writer.flush()?;
    Ok(())
}

fn output_bytes(profile: &Profile, layer: &str) -> u64 {
    let mut tensors: Vec<(&str, u64)> = profile
        .edges
        .iter()
        .filter(|e| e.from == layer)
        .map(|e| (e.tensor.as_str(), e.bytes))
        .collect();
    tensors.sort_unstable();
    tensors.dedup_by_key(|(tensor, _)| *tensor);
    tensors.iter().map(|(_, bytes)| bytes).sum()
}

fn milliseconds(ms: f64) -> String {
    match ms {
        _ if ms == 0.0 => "-".into(),
        _ if ms < 0.1 => format!("{:.1} us", ms * 1e3),
        _ if ms < 10.0 => format!("{ms:.2} ms"),
        _ if ms < 1e4 => format!("{ms:.1} ms"),
        _ => format!("{:.2} s", ms / 1e3),
    }
}

fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if bytes == 0 {
        return "-".into();
    }
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1e3;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;
    use planner::profile::{Edge, FileRef, PROFILE_SCHEMA};

    fn two_layers() -> Profile {
        let layer = |name: &str, forward_ms, backward_ms| LayerProfile {
            name: name.into(),
            kind: "Conv".into(),
            forward_ms,
            backward_ms,
            parameter_bytes: 2_500_000,
            ..LayerProfile::default()
        };
        let edge = |to: &str| Edge {
            from: "a".into(),
            to: to.into(),
            tensor: "t".into(),
            bytes: 64,
            gradient: true,
            gradient_bytes: None,
        };
        Profile {
            schema: PROFILE_SCHEMA.into(),
            model: FileRef {
                file: "m.onnx".into(),
                sha256: String::new(),
            },
            device: "cpu".into(),
            batch_size: 10,
            threads: 1,
            optimizer: None,
            reading: None,
            layers: vec![layer("a", 1.0, 2.0), layer("b", 3.0, 4.0)],
            edges: vec![edge("b"), edge("c")],
            tied: Vec::new(),
            whole_step_ms: Some(8.0),
            whole_step_samples_ms: vec![],
            communication_s_per_byte: 0.0,
        }
    }

    #[test]
    fn table_gives_shares_totals_and_the_gap() {
        let text = table(&two_layers());
        assert!(text.contains("30.0 %"), "{text}");
        assert!(text.contains("2 layers"), "{text}");
        assert!(
            text.contains(
                "whole step 8.00 ms (1250.0 samples/s); the layers sum to 10.0 ms (+25.0 %)"
            ),
            "{text}"
        );
    }

    #[test]
    fn csv_counts_a_tensor_once_however_many_read_it() {
        let mut out = Vec::new();
        write_csv(&two_layers(), &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let first = text.lines().nth(1).unwrap();
        assert!(
            first.starts_with("a,Conv,1,0,2,0,0,0,2500000,0,64"),
            "{first}"
        );
    }

    #[test]
    fn sizes_change_unit_before_four_digits() {
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(999_400), "999.4 kB");
        assert_eq!(bytes(999_600), "1.0 MB");
    }
}
