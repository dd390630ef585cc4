//! Pictures: throughput over the number of workers, the plan against data parallel; what a sweep found.

mod axis;
mod heat_map;
mod lines;

use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::file::{self, FileError};
use crate::planning::Point;

pub use heat_map::HeatMap;
pub use lines::{Lines, Series};

/// What to draw.
#[derive(Clone, Copy, Debug)]
pub enum Picture<'a> {
    /// Throughput over the number of workers.
    Chart(&'a Chart<'a>),
    /// Quantities over the axis of a sweep.
    Lines(&'a Lines),
    /// A quantity over both axes of a sweep.
    HeatMap(&'a HeatMap),
}

impl Picture<'_> {
    fn draw<B: DrawingBackend>(
        &self,
        root: &DrawingArea<B, Shift>,
        scale: u32,
    ) -> Result<(), PlotError> {
        match self {
            Self::Chart(chart) => draw(root, chart, scale),
            Self::Lines(lines) => lines.draw(root, scale),
            Self::HeatMap(map) => map.draw(root, scale),
        }
    }

    /// Writes the kind of file that the name ends in, .svg or .png; without an ending both.
    ///
    /// # Errors
    /// If the ending is another one, or it cannot be drawn or written.
    pub fn write(&self, path: &Path) -> Result<(), PlotError> {
        let extension = path.extension().and_then(|e| e.to_str());
        match extension.map(str::to_ascii_lowercase).as_deref() {
            Some("svg") => self.write_svg(path),
            Some("png") => self.write_png(path),
            Some(_) => Err(PlotError::Extension(path.to_owned())),
            None => {
                self.write_svg(&path.with_extension("svg"))?;
                self.write_png(&path.with_extension("png"))
            }
        }
    }

    /// Writes it as SVG.
    fn write_svg(&self, path: &Path) -> Result<(), PlotError> {
        register_fonts()?;
        let mut text = String::new();
        {
            let root = SVGBackend::with_string(&mut text, (WIDTH, HEIGHT)).into_drawing_area();
            self.draw(&root, 1)?;
        }
        Ok(file::write_atomically(path, text.as_bytes())?)
    }

    /// Writes it as PNG, at twice the SVG's resolution.
    fn write_png(&self, path: &Path) -> Result<(), PlotError> {
        register_fonts()?;
        let (width, height) = (WIDTH * PNG_SCALE, HEIGHT * PNG_SCALE);
        let mut pixels = vec![0; (width * height * 3) as usize];
        {
            let root = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
            self.draw(&root, PNG_SCALE)?;
        }
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().map_err(failed)?;
        writer.write_image_data(&pixels).map_err(failed)?;
        writer.finish().map_err(failed)?;
        Ok(file::write_atomically(path, &bytes)?)
    }
}

/// Throughput over the number of workers.
#[derive(Clone, Copy, Debug)]
pub struct Chart<'a> {
    /// First line.
    pub title: &'a str,
    /// Second line.
    pub subtitle: &'a str,
    /// Ascending in devices.
    pub points: &'a [Point],
}

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// An unknown kind of file.
    #[error("{}: a picture's name ends in .svg or .png; without an ending both are written", .0.display())]
    Extension(PathBuf),
    /// The file could not be written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The drawing library failed.
    #[error("the picture could not be drawn: {0}")]
    Draw(String),
}

const WIDTH: u32 = 960;
const HEIGHT: u32 = 600;
/// Screens with dense pixels blur a bitmap of the vector size.
const PNG_SCALE: u32 = 2;
const FONT: &str = "DejaVu Sans";

const PLAN: RGBColor = RGBColor(0, 98, 155);
const DATA_PARALLEL: RGBColor = RGBColor(213, 94, 0);
const IDEAL: RGBColor = RGBColor(150, 150, 150);
const TEXT: RGBColor = RGBColor(40, 40, 40);

fn failed(error: impl std::fmt::Display) -> PlotError {
    PlotError::Draw(error.to_string())
}

/// The embedded font, so that a machine without any draws the same picture.
fn register_fonts() -> Result<(), PlotError> {
    use plotters::style::{FontStyle, register_font};
    let fonts = [
        (FontStyle::Normal, dejavu::sans::regular()),
        (FontStyle::Bold, dejavu::sans::bold()),
    ];
    for (style, bytes) in fonts {
        register_font(FONT, style, bytes)
            .map_err(|_| PlotError::Draw("the embedded font is damaged".to_owned()))?;
    }
    Ok(())
}

fn draw<B: DrawingBackend>(
    root: &DrawingArea<B, Shift>,
    chart: &Chart,
    scale: u32,
) -> Result<(), PlotError> {
    let px = |size: u32| size * scale;
    let font = |size: u32| (FONT, px(size)).into_font().color(&TEXT);
    heading(root, chart.title, chart.subtitle, scale)?;
    let area = root.margin(px(76), px(14), px(12), px(24));

    let most = chart.points.last().map_or(1, |p| p.devices);
    let highest = chart
        .points
        .iter()
        .flat_map(|p| [Some(p.ideal), p.plan, p.data_parallel])
        .flatten()
        .fold(0.0, f64::max);
    // One worker alone still needs an axis with some length.
    let right = (most as f64).max(2.0) * 1.02;
    let mut context = ChartBuilder::on(&area)
        .x_label_area_size(px(52))
        .y_label_area_size(px(84))
        .build_cartesian_2d(0.0..right, 0.0..highest * 1.06)
        .map_err(failed)?;
    context
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(225, 225, 225).stroke_width(scale))
        .axis_style(RGBColor(120, 120, 120).stroke_width(scale))
        .x_desc("workers")
        .y_desc("samples per second")
        .x_labels(most.min(12) + 1)
        .y_labels(8)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| thousands(*y))
        .label_style(font(14))
        .axis_desc_style(font(15))
        .draw()
        .map_err(failed)?;

    let ideal: Vec<(f64, f64)> = std::iter::once((0.0, 0.0))
        .chain(chart.points.iter().map(|p| (p.devices as f64, p.ideal)))
        .collect();
    context
        .draw_series(DashedLineSeries::new(
            ideal,
            px(7),
            px(6),
            IDEAL.stroke_width(px(2)),
        ))
        .map_err(failed)?
        .label("ideal: one worker times N")
        .legend(move |(x, y)| legend_line(x, y, IDEAL, scale));
    let of = |value: fn(&Point) -> Option<f64>| -> Vec<(f64, f64)> {
        let values = chart.points.iter().map(|p| (p.devices as f64, value(p)));
        values.filter_map(|(x, y)| Some((x, y?))).collect()
    };
    for (name, color, points) in [
        ("data parallel", DATA_PARALLEL, of(|p| p.data_parallel)),
        ("pipeline plan", PLAN, of(|p| p.plan)),
    ] {
        context
            .draw_series(LineSeries::new(
                points.iter().copied(),
                color.stroke_width(px(3)),
            ))
            .map_err(failed)?
            .label(name)
            .legend(move |(x, y)| legend_line(x, y, color, scale));
        context
            .draw_series(
                points
                    .iter()
                    .map(|&point| Circle::new(point, px(5), color.filled())),
            )
            .map_err(failed)?;
    }
    series_labels(&mut context, scale)?;
    root.present().map_err(failed)
}

/// The box that names the series, in the upper left corner.
fn series_labels<'a, B: DrawingBackend + 'a, C: CoordTranslate>(
    context: &mut ChartContext<'a, B, C>,
    scale: u32,
) -> Result<(), PlotError> {
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .margin(16 * scale)
        .legend_area_size(40 * scale)
        .background_style(WHITE.mix(0.9))
        .label_font((FONT, 15 * scale).into_font().color(&TEXT))
        .draw()
        .map_err(failed)
}

/// Fills the background and writes title and subtitle.
fn heading<B: DrawingBackend>(
    root: &DrawingArea<B, Shift>,
    title: &str,
    subtitle: &str,
    scale: u32,
) -> Result<(), PlotError> {
    let px = |size: u32| size * scale;
    root.fill(&WHITE).map_err(failed)?;
    let bold = (FONT, px(22))
        .into_font()
        .style(FontStyle::Bold)
        .color(&TEXT);
    let margin = i32::try_from(px(24)).unwrap_or(24);
    root.draw_text(title, &bold, (margin, margin * 3 / 4))
        .map_err(failed)?;
    let plain = (FONT, px(15)).into_font().color(&TEXT);
    root.draw_text(subtitle, &plain, (margin, margin * 2))
        .map_err(failed)
}

fn legend_line(x: i32, y: i32, color: RGBColor, scale: u32) -> PathElement<(i32, i32)> {
    let length = i32::try_from(30 * scale).unwrap_or(30);
    // The library hands over the middle of the row, a little below that of the letters.
    let y = y - i32::try_from(2 * scale).unwrap_or(2);
    PathElement::new(vec![(x, y), (x + length, y)], color.stroke_width(3 * scale))
}

/// `12 000` rather than `12000`.
fn thousands(value: f64) -> String {
    if value > 0.0 && value < 10.0 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(most: usize) -> Vec<Point> {
        (1..=most)
            .map(|devices| Point {
                devices,
                plan: (devices > 1).then_some(90.0 * devices as f64),
                data_parallel: Some(60.0 * devices as f64),
                ideal: 100.0 * devices as f64,
            })
            .collect()
    }

    #[test]
    fn both_formats_are_drawn_for_one_worker_and_for_many() {
        let folder = tempfile::tempdir().unwrap();
        for most in [1, 5] {
            let points = points(most);
            let chart = Chart {
                title: "model",
                subtitle: "cluster",
                points: &points,
            };
            let svg = folder.path().join("plot.svg");
            Picture::Chart(&chart).write(&svg).unwrap();
            let text = std::fs::read_to_string(&svg).unwrap();
            assert!(text.contains("pipeline plan") && text.contains("data parallel"));
            let file = folder.path().join("plot.png");
            Picture::Chart(&chart).write(&file).unwrap();
            let decoder = png::Decoder::new(std::io::Cursor::new(std::fs::read(&file).unwrap()));
            let mut reader = decoder.read_info().unwrap();
            let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
            reader.next_frame(&mut pixels).unwrap();
            let blue = pixels.chunks(3).filter(|p| *p == [PLAN.0, PLAN.1, PLAN.2]);
            // Circles and legend at least; with no text drawn there would be no dark pixels.
            assert!(blue.count() > 50);
            assert!(pixels.chunks(3).any(|p| p == [TEXT.0, TEXT.1, TEXT.2]));
        }
    }
}
