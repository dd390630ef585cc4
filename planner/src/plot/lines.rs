//! Lines over the axis of a sweep.

use plotters::coord::Shift;
use plotters::prelude::*;

use super::axis::Axis;
use super::{
    DATA_PARALLEL, FONT, PLAN, PlotError, TEXT, failed, heading, legend_line, series_labels,
    thousands,
};

/// Several quantities over one axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Lines {
    /// First line.
    pub title: String,
    /// Second line.
    pub subtitle: String,
    /// What the horizontal axis shows.
    pub x_label: &'static str,
    /// What the vertical axis shows.
    pub y_label: &'static str,
    /// Positions on the horizontal axis, ascending, and how they are written.
    pub x: Vec<(f64, String)>,
    /// Whether the horizontal axis is logarithmic; its positions are positive then.
    pub logarithmic: bool,
    /// The lines.
    pub series: Vec<Series>,
}

/// A line.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: &'static str,
    /// One value for each position, where there is one.
    pub values: Vec<Option<f64>>,
}

/// Colours that colour-blind readers can tell apart, in the order of the series.
const COLORS: [RGBColor; 4] = [
    PLAN,
    DATA_PARALLEL,
    RGBColor(0, 158, 115),
    RGBColor(170, 100, 150),
];
/// More labels than this on the horizontal axis would touch each other.
const MOST_LABELS: usize = 12;

/// The legend stands above the lines.
const HEADROOM: f64 = 1.3;

impl Lines {
    pub(super) fn draw<B: DrawingBackend>(
        &self,
        root: &DrawingArea<B, Shift>,
        scale: u32,
    ) -> Result<(), PlotError> {
        let px = |size: u32| size * scale;
        let font = |size: u32| (FONT, px(size)).into_font().color(&TEXT);
        heading(root, &self.title, &self.subtitle, scale)?;
        let area = root.margin(px(76), px(14), px(12), px(36));
        let place = |x: f64| if self.logarithmic { x.log10() } else { x };
        let places: Vec<f64> = self.x.iter().map(|(x, _)| place(*x)).collect();
        let (first, last) = match (places.first(), places.last()) {
            (Some(&first), Some(&last)) => (first, last),
            _ => (0.0, 1.0),
        };
        // A single position still needs an axis with some length.
        let room = ((last - first) * 0.03).max(0.05);
        let left = if self.logarithmic { first - room } else { 0.0 };
        let highest = self
            .series
            .iter()
            .flat_map(|s| s.values.iter().flatten().copied())
            .fold(0.0, f64::max)
            .max(f64::MIN_POSITIVE);
        let every = places.len().div_ceil(MOST_LABELS).max(1);
        // Counted from the last one, which is what a sweep is about.
        let labelled: Vec<f64> = places.iter().rev().step_by(every).rev().copied().collect();
        let label = |at: &f64| {
            let nearest = places.iter().position(|p| (p - at).abs() < 1e-9);
            nearest.map_or(String::new(), |i| self.x[i].1.clone())
        };
        let horizontal = Axis {
            range: left..last + room,
            ticks: labelled,
        };
        let mut context = ChartBuilder::on(&area)
            .x_label_area_size(px(52))
            .y_label_area_size(px(92))
            .build_cartesian_2d(horizontal, 0.0..highest * HEADROOM)
            .map_err(failed)?;
        context
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(225, 225, 225).stroke_width(scale))
            .axis_style(RGBColor(120, 120, 120).stroke_width(scale))
            .x_desc(self.x_label)
            .y_desc(self.y_label)
            .y_labels(8)
            .x_label_formatter(&label)
            .y_label_formatter(&|y| thousands(*y))
            .label_style(font(14))
            .axis_desc_style(font(15))
            .draw()
            .map_err(failed)?;
        // The first series is what the picture is about: it is drawn last, on top.
        for (series, color) in self.series.iter().zip(COLORS).rev() {
            let points: Vec<(f64, f64)> = places
                .iter()
                .zip(&series.values)
                .filter_map(|(&x, y)| Some((x, (*y)?)))
                .collect();
            context
                .draw_series(LineSeries::new(
                    points.iter().copied(),
                    color.stroke_width(px(3)),
                ))
                .map_err(failed)?
                .label(series.name)
                .legend(move |(x, y)| legend_line(x, y, color, scale));
            let circles = points
                .iter()
                .map(|&p| Circle::new(p, px(4), color.filled()));
            context.draw_series(circles).map_err(failed)?;
        }
        series_labels(&mut context, scale)?;
        root.present().map_err(failed)
    }
}
