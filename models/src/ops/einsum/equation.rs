//! The equation of an Einsum: labels of the axes of operands and output.

/// An equation whose labels are numbers: letters first, then the axes that an ellipsis stands for.
#[derive(Debug)]
pub(super) struct Equation {
    /// Labels of each operand's axes.
    pub operands: Vec<Vec<usize>>,
    /// Labels of the output's axes.
    pub output: Vec<usize>,
    /// Shapes of the operands.
    shapes: Vec<Vec<usize>>,
}

/// A term of the equation: the letters before and after an ellipsis, if there is one.
struct Term {
    before: Vec<usize>,
    after: Option<Vec<usize>>,
}

/// Number of the first axis of an ellipsis; letters have the numbers of their code points, which are below.
const ELLIPSIS: usize = 1 << 8;

impl Term {
    fn parse(text: &str) -> Result<Self, String> {
        let labels = |part: &str| -> Result<Vec<usize>, String> {
            let wrong = part.chars().find(|c| !c.is_ascii_alphabetic());
            match wrong {
                Some(c) => Err(format!("{c:?} is no label in {text:?}")),
                None => Ok(part.bytes().map(usize::from).collect()),
            }
        };
        let parts: Vec<&str> = text.split("...").collect();
        match parts[..] {
            [before] => Ok(Term {
                before: labels(before)?,
                after: None,
            }),
            [before, after] => Ok(Term {
                before: labels(before)?,
                after: Some(labels(after)?),
            }),
            _ => Err(format!("{text:?} has more than one ellipsis")),
        }
    }

    fn letters(&self) -> impl Iterator<Item = usize> {
        self.before
            .iter()
            .chain(self.after.iter().flatten())
            .copied()
    }

    /// Labels with an ellipsis of `axes` axes, numbered so that the last ones of all ellipses agree.
    fn labels(&self, axes: usize, most: usize) -> Vec<usize> {
        let mut labels = self.before.clone();
        if let Some(after) = &self.after {
            labels.extend((most - axes..most).map(|axis| ELLIPSIS + axis));
            labels.extend(after);
        }
        labels
    }
}

impl Equation {
    /// Reads an equation for operands of these shapes; the error says what is wrong with it.
    pub fn parse(text: &str, shapes: &[&[usize]]) -> Result<Self, String> {
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let (left, right) = match text.split_once("->") {
            Some((left, right)) => (left, Some(Term::parse(right)?)),
            None => (&text[..], None),
        };
        let terms = left
            .split(',')
            .map(Term::parse)
            .collect::<Result<Vec<_>, _>>()?;
        if terms.len() != shapes.len() {
            return Err(format!(
                "{text:?} is for {} inputs, not {}",
                terms.len(),
                shapes.len()
            ));
        }
        let mut hidden = Vec::new();
        for (term, shape) in terms.iter().zip(shapes) {
            let named = term.letters().count();
            let rest = shape.len().checked_sub(named);
            let rest = rest.filter(|&rest| rest == 0 || term.after.is_some());
            hidden.push(rest.ok_or_else(|| {
                format!("{text:?} does not name the axes of an input of shape {shape:?}")
            })?);
        }
        let most = hidden.iter().copied().max().unwrap_or(0);
        let operands: Vec<Vec<usize>> = terms
            .iter()
            .zip(&hidden)
            .map(|(term, &axes)| term.labels(axes, most))
            .collect();
        let output = match right {
            Some(term) => term.labels(most, most),
            None => implied(&terms, most),
        };
        let equation = Equation {
            operands,
            output,
            shapes: shapes.iter().map(|shape| shape.to_vec()).collect(),
        };
        equation.check(&text)?;
        Ok(equation)
    }

    fn check(&self, text: &str) -> Result<(), String> {
        for (at, label) in self.output.iter().enumerate() {
            if self.output[..at].contains(label) {
                return Err(format!("{text:?} has a label twice in its output"));
            }
            if !self.operands.iter().any(|labels| labels.contains(label)) {
                return Err(format!(
                    "{text:?} has a label in its output that no input has"
                ));
            }
        }
        for (labels, shape) in self.operands.iter().zip(&self.shapes) {
            for (axis, &label) in labels.iter().enumerate() {
                // Axes of extent 1 repeat, except along a diagonal.
                let twice = labels.iter().filter(|&&l| l == label).count() > 1;
                let extent = self.extent(label);
                if shape[axis] != extent && (shape[axis] != 1 || twice) {
                    return Err(format!(
                        "{text:?} gives one label to axes of {extent} and {} elements",
                        shape[axis]
                    ));
                }
            }
        }
        Ok(())
    }

    /// Extent of a label's axes.
    pub fn extent(&self, label: usize) -> usize {
        let axes = self.operands.iter().zip(&self.shapes);
        let extents = axes.flat_map(|(labels, shape)| labels.iter().zip(shape));
        extents
            .filter(|(l, _)| **l == label)
            .map(|(_, &extent)| extent)
            .max()
            .unwrap_or(1)
    }

    /// Labels of an operand, each once, without those for which it has only one element to repeat.
    pub fn present(&self, operand: usize) -> Vec<usize> {
        let mut present = Vec::new();
        for (&label, &extent) in self.operands[operand].iter().zip(&self.shapes[operand]) {
            if extent == self.extent(label) && !present.contains(&label) {
                present.push(label);
            }
        }
        present
    }
}

/// Without an arrow: the ellipsis, then the letters that stand once, in alphabetical order.
fn implied(terms: &[Term], most: usize) -> Vec<usize> {
    let mut letters: Vec<usize> = terms.iter().flat_map(Term::letters).collect();
    letters.sort_unstable();
    let once = |letter: &usize| letters.iter().filter(|l| *l == letter).count() == 1;
    let ellipsis = (0..most).map(|axis| ELLIPSIS + axis);
    ellipsis
        .chain(letters.iter().copied().filter(once))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equations_are_read_as_numpy_reads_them() {
        let parse = |text: &str, shapes: &[&[usize]]| Equation::parse(text, shapes);
        let output = |text: &str, shapes: &[&[usize]]| -> Vec<usize> {
            let equation = parse(text, shapes).unwrap();
            equation
                .output
                .iter()
                .map(|&l| equation.extent(l))
                .collect()
        };
        assert_eq!(
            output("bij, bjk -> bik", &[&[2, 3, 4], &[2, 4, 5]]),
            [2, 3, 5]
        );
        assert_eq!(output("ba", &[&[2, 3]]), [3, 2]);
        assert_eq!(output("i,i", &[&[4], &[4]]), []);
        assert_eq!(output("...ii->...i", &[&[2, 5, 3, 3]]), [2, 5, 3]);
        assert_eq!(output("...ij,jk", &[&[2, 3, 4], &[4, 5]]), [2, 3, 5]);
        assert_eq!(output("i...,...->...i", &[&[4, 1, 2], &[3, 2]]), [3, 2, 4]);
    }

    #[test]
    fn wrong_equations_are_told() {
        let told = |text: &str, shapes: &[&[usize]]| Equation::parse(text, shapes).unwrap_err();
        assert!(told("ij->ik", &[&[2, 3]]).contains("no input has"));
        assert!(told("ij->ii", &[&[2, 3]]).contains("twice"));
        assert!(told("ij,jk", &[&[2, 3]]).contains("2 inputs"));
        assert!(told("ij", &[&[2, 3, 4]]).contains("does not name"));
        assert!(told("ij,jk", &[&[2, 3], &[4, 5]]).contains("4 and 3"));
        assert!(told("ii", &[&[1, 3]]).contains("3 and 1"));
        assert!(told("i1", &[&[2, 3]]).contains("'1'"));
        assert!(told("......", &[&[2, 3]]).contains("more than one"));
    }
}
