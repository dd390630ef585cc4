//! A quantity over both axes of a sweep.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::axis::Axis;
use super::{DATA_PARALLEL, FONT, PLAN, PlotError, TEXT, failed, heading};

/// A speed-up for every pair of positions.
#[derive(Clone, Debug, PartialEq)]
pub struct HeatMap {
    /// First line.
    pub title: String,
    /// Second line.
    pub subtitle: String,
    /// What the horizontal axis shows.
    pub x_label: &'static str,
    /// What the vertical axis shows.
    pub y_label: &'static str,
    /// Columns, from the left.
    pub columns: Vec<String>,
    /// Rows, from below.
    pub rows: Vec<String>,
    /// Rows from below, each from the left; none where there is no plan.
    pub values: Vec<Vec<Option<f64>>>,
}

const NOTHING: RGBColor = RGBColor(235, 235, 235);

impl HeatMap {
    pub(super) fn draw<B: DrawingBackend>(
        &self,
        root: &DrawingArea<B, Shift>,
        scale: u32,
    ) -> Result<(), PlotError> {
        let px = |size: u32| size * scale;
        let font = |size: u32| (FONT, px(size)).into_font().color(&TEXT);
        heading(root, &self.title, &self.subtitle, scale)?;
        let area = root.margin(px(76), px(14), px(12), px(24));
        let (columns, rows) = (self.columns.len(), self.rows.len());
        let cells = |n: usize| Axis {
            range: 0.0..n as f64,
            ticks: (0..n).map(|i| i as f64 + 0.5).collect(),
        };
        let name = |names: &[String], at: f64| names.get(at as usize).cloned().unwrap_or_default();
        let mut context = ChartBuilder::on(&area)
            .x_label_area_size(px(52))
            .y_label_area_size(px(100))
            .build_cartesian_2d(cells(columns), cells(rows))
            .map_err(failed)?;
        context
            .configure_mesh()
            .disable_mesh()
            .axis_style(RGBColor(120, 120, 120).stroke_width(scale))
            .x_desc(self.x_label)
            .y_desc(self.y_label)
            .x_label_formatter(&|x| name(&self.columns, *x))
            .y_label_formatter(&|y| name(&self.rows, *y))
            .label_style(font(14))
            .axis_desc_style(font(15))
            .draw()
            .map_err(failed)?;
        let strongest = self
            .values
            .iter()
            .flatten()
            .flatten()
            .fold(0.0f64, |most, value| most.max(value.ln().abs()))
            .max(f64::MIN_POSITIVE);
        for (row, values) in self.values.iter().enumerate() {
            for (column, value) in values.iter().enumerate() {
                let share = value.map_or(0.0, |v| v.ln() / strongest);
                let color = if value.is_none() {
                    NOTHING
                } else {
                    shade(share)
                };
                let (x, y) = (column as f64, row as f64);
                let cell = Rectangle::new([(x, y), (x + 1.0, y + 1.0)], color.filled());
                context.draw_series(std::iter::once(cell)).map_err(failed)?;
                let ink = if share.abs() > 0.6 { WHITE } else { TEXT };
                let style = (FONT, px(if columns > 12 { 11 } else { 14 }))
                    .into_font()
                    .color(&ink)
                    .pos(Pos::new(HPos::Center, VPos::Center));
                let text = value.map_or("\u{2013}".to_owned(), |v| format!("{v:.2}"));
                let text = Text::new(text, (x + 0.5, y + 0.5), style);
                context.draw_series(std::iter::once(text)).map_err(failed)?;
            }
        }
        root.present().map_err(failed)
    }
}

/// White at 0, the plan's colour at 1, data parallel's at -1.
fn shade(share: f64) -> RGBColor {
    let full = if share >= 0.0 { PLAN } else { DATA_PARALLEL };
    let mix = |full: u8| (255.0 + (f64::from(full) - 255.0) * share.abs().min(1.0)).round() as u8;
    RGBColor(mix(full.0), mix(full.1), mix(full.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shades_run_from_one_opponent_over_white_to_the_other() {
        assert_eq!(shade(0.0), WHITE);
        assert_eq!(shade(1.0), PLAN);
        assert_eq!(shade(-2.0), DATA_PARALLEL);
    }
}
