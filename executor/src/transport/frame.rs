//! What processes say to each other, as bytes in frames of bounded size.
//!
//! A frame begins with the number of its parcel among those to the same process, its index in the parcel
//! and the number of the parcel's frames; frames of several parcels may be mixed on their way. Numbers
//! are little-endian, as the processors that this runs on.

use std::io::{self, Read, Write};

use models::tensor::{DType, Tensor};

use super::ring::Chunk;
use super::{Direction, Group, Message, Tag};

/// Most bytes of a frame. It is longer than what MPI libraries send without being asked for (64 KiB), so that a frame
/// counts as sent only when it is on its way, and short enough for others not to wait long behind it.
pub const FRAME_BYTES: usize = 256 << 10;

/// Bytes before a frame's content.
const HEADER_BYTES: usize = 16;

/// A note of the training program, with tensors where it has some.
#[derive(Clone, Debug, Default)]
pub struct Letter {
    /// JSON.
    pub text: String,
    /// What goes with it.
    pub tensors: Vec<Tensor>,
}

/// What one process says to another.
#[derive(Debug)]
pub enum Parcel {
    /// A worker's message to another.
    Message(Tag, Message),
    /// Part of an all-reduce.
    Chunk(Chunk),
    /// From coordinator to worker or back, with its number among the letters to the same process. The last
    /// is empty: nothing more will come.
    Letter(u64, Option<Letter>),
    /// The process is there; its worker was at work for so many nanoseconds.
    Beat(u64),
}

/// The frames of a parcel.
pub fn encode(number: u64, parcel: &Parcel) -> Vec<Vec<u8>> {
    let mut writer = FrameWriter {
        number,
        frames: Vec::new(),
    };
    writer.open();
    // Writing to memory does not fail.
    write_parcel(&mut writer, parcel).expect("frames grow as needed");
    writer.close()
}

/// Frames of one parcel, as they come.
#[derive(Debug)]
pub struct Assembly {
    frames: Vec<Vec<u8>>,
    missing: usize,
}

/// Number of the parcel that a frame belongs to, its index and the number of frames.
///
/// # Errors
/// When it is no frame.
pub fn header(frame: &[u8]) -> io::Result<(u64, usize, usize)> {
    let mut header = frame;
    let number = read_u64(&mut header)?;
    let index = read_u32(&mut header)? as usize;
    let count = read_u32(&mut header)? as usize;
    if index >= count {
        return Err(malformed("a frame that is not one of its parcel's"));
    }
    Ok((number, index, count))
}

impl Assembly {
    /// Awaits so many frames.
    pub fn new(count: usize) -> Self {
        Assembly {
            frames: vec![Vec::new(); count],
            missing: count,
        }
    }

    /// Takes the frame with this index; true when all are there.
    ///
    /// # Errors
    /// When it came before.
    pub fn take(&mut self, index: usize, frame: Vec<u8>) -> io::Result<bool> {
        match self.frames.get_mut(index) {
            Some(slot) if slot.is_empty() => *slot = frame,
            _ => return Err(malformed("a frame that came twice")),
        }
        self.missing -= 1;
        Ok(self.missing == 0)
    }

    /// The parcel, once all frames are there.
    ///
    /// # Errors
    /// When it cannot be read: the sender is another program.
    pub fn parcel(self) -> io::Result<Parcel> {
        let contents = self.frames.iter().map(|frame| &frame[HEADER_BYTES..]);
        read_parcel(&mut FrameReader {
            rest: contents.collect(),
            at: 0,
        })
    }
}

struct FrameWriter {
    number: u64,
    frames: Vec<Vec<u8>>,
}

impl FrameWriter {
    fn open(&mut self) {
        let mut frame = Vec::with_capacity(HEADER_BYTES);
        frame.extend(self.number.to_le_bytes());
        frame.extend((self.frames.len() as u32).to_le_bytes());
        // The number of frames follows when it is known.
        frame.extend([0; 4]);
        self.frames.push(frame);
    }

    fn close(mut self) -> Vec<Vec<u8>> {
        let count = (self.frames.len() as u32).to_le_bytes();
        for frame in &mut self.frames {
            frame[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&count);
        }
        self.frames
    }
}

impl Write for FrameWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.frames.last().is_none_or(|f| f.len() == FRAME_BYTES) {
            self.open();
        }
        let frame = self.frames.last_mut().expect("one was opened");
        let taken = bytes.len().min(FRAME_BYTES - frame.len());
        frame.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct FrameReader<'a> {
    rest: Vec<&'a [u8]>,
    at: usize,
}

impl Read for FrameReader<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        while let Some(content) = self.rest.get_mut(self.at) {
            if !content.is_empty() {
                return content.read(target);
            }
            self.at += 1;
        }
        Ok(0)
    }
}

fn write_parcel(to: &mut impl Write, parcel: &Parcel) -> io::Result<()> {
    match parcel {
        Parcel::Message(tag, message) => {
            to.write_all(&[0])?;
            write_u64(to, tag.minibatch)?;
            to.write_all(&[match tag.direction {
                Direction::Forward => 0,
                Direction::Backward => 1,
            }])?;
            match message {
                Message::Stopped => to.write_all(&[0]),
                Message::Tensors(tensors) => {
                    to.write_all(&[1])?;
                    write_tensors(to, tensors.iter().map(Option::as_ref))
                }
            }
        }
        Parcel::Chunk(chunk) => {
            to.write_all(&[1])?;
            for number in [
                chunk.group.first,
                chunk.group.replicas,
                chunk.index,
                chunk.hops,
                chunk.givers,
            ] {
                write_u64(to, number as u64)?;
            }
            write_u64(to, chunk.round)?;
            write_u64(to, chunk.shapes.len() as u64)?;
            for shape in &chunk.shapes {
                write_shape(to, shape)?;
            }
            write_tensors(to, [Some(&chunk.values)].into_iter())
        }
        Parcel::Letter(number, letter) => {
            to.write_all(&[2])?;
            write_u64(to, *number)?;
            let Some(letter) = letter else {
                return to.write_all(&[0]);
            };
            to.write_all(&[1])?;
            write_u64(to, letter.text.len() as u64)?;
            to.write_all(letter.text.as_bytes())?;
            write_tensors(to, letter.tensors.iter().map(Some))
        }
        Parcel::Beat(busy) => {
            to.write_all(&[3])?;
            write_u64(to, *busy)
        }
    }
}

fn read_parcel(from: &mut impl Read) -> io::Result<Parcel> {
    Ok(match read_u8(from)? {
        0 => {
            let minibatch = read_u64(from)?;
            let direction = match read_u8(from)? {
                0 => Direction::Forward,
                1 => Direction::Backward,
                _ => return Err(malformed("an unknown direction")),
            };
            let tag = Tag {
                minibatch,
                direction,
            };
            let message = match read_u8(from)? {
                0 => Message::Stopped,
                _ => Message::Tensors(read_tensors(from)?),
            };
            Parcel::Message(tag, message)
        }
        1 => {
            let mut numbers = [0; 5];
            for number in &mut numbers {
                *number = read_u64(from)? as usize;
            }
            let [first, replicas, index, hops, givers] = numbers;
            let round = read_u64(from)?;
            let shapes = (0..read_u64(from)?).map(|_| read_shape(from));
            Parcel::Chunk(Chunk {
                group: Group { first, replicas },
                round,
                index,
                hops,
                givers,
                shapes: shapes.collect::<io::Result<_>>()?,
                values: read_tensors(from)?
                    .pop()
                    .flatten()
                    .ok_or_else(|| malformed("a chunk without values"))?,
            })
        }
        2 => {
            let number = read_u64(from)?;
            if read_u8(from)? == 0 {
                return Ok(Parcel::Letter(number, None));
            }
            let mut text = Vec::new();
            let len = read_u64(from)?;
            from.by_ref().take(len).read_to_end(&mut text)?;
            let letter = Letter {
                text: String::from_utf8(text).map_err(|_| malformed("text that is not UTF-8"))?,
                tensors: read_tensors(from)?.into_iter().flatten().collect(),
            };
            Parcel::Letter(number, Some(letter))
        }
        3 => Parcel::Beat(read_u64(from)?),
        _ => return Err(malformed("an unknown kind of parcel")),
    })
}

const NO_TENSOR: u8 = 0;
const SHARED: u8 = 1;
const F32: u8 = 2;
const I64: u8 = 3;
const I32: u8 = 4;
const BOOL: u8 = 5;

/// Tensors that share memory travel once.
fn write_tensors<'a>(
    to: &mut impl Write,
    tensors: impl ExactSizeIterator<Item = Option<&'a Tensor>>,
) -> io::Result<()> {
    write_u64(to, tensors.len() as u64)?;
    let mut sent: Vec<Option<&Tensor>> = Vec::new();
    for tensor in tensors {
        if let Some(tensor) = tensor {
            let same = |earlier: &Option<&Tensor>| earlier.is_some_and(|t| t.same_buffer(tensor));
            if let Some(earlier) = sent.iter().position(same) {
                to.write_all(&[SHARED])?;
                write_u64(to, earlier as u64)?;
                write_shape(to, tensor.shape())?;
            } else {
                to.write_all(&[match tensor.dtype() {
                    DType::F32 => F32,
                    DType::I64 => I64,
                    DType::I32 => I32,
                    DType::Bool => BOOL,
                }])?;
                write_shape(to, tensor.shape())?;
                to.write_all(tensor.raw())?;
            }
        } else {
            to.write_all(&[NO_TENSOR])?;
        }
        sent.push(tensor);
    }
    Ok(())
}

fn read_tensors(from: &mut impl Read) -> io::Result<Vec<Option<Tensor>>> {
    let mut tensors: Vec<Option<Tensor>> = Vec::new();
    for _ in 0..read_u64(from)? {
        let dtype = match read_u8(from)? {
            NO_TENSOR => {
                tensors.push(None);
                continue;
            }
            SHARED => {
                let earlier = read_u64(from)? as usize;
                let shape = read_shape(from)?;
                let earlier = tensors.get(earlier).and_then(Option::as_ref);
                match earlier {
                    Some(earlier) if earlier.len() == shape.iter().product::<usize>() => {
                        let tensor = earlier.reshape(&shape);
                        tensors.push(Some(tensor));
                    }
                    _ => return Err(malformed("a tensor in the memory of none")),
                }
                continue;
            }
            F32 => DType::F32,
            I64 => DType::I64,
            I32 => DType::I32,
            BOOL => DType::Bool,
            _ => return Err(malformed("an unknown element type")),
        };
        let mut tensor = Tensor::zeros(dtype, &read_shape(from)?);
        from.read_exact(tensor.raw_mut().expect("it is new"))?;
        tensors.push(Some(tensor));
    }
    Ok(tensors)
}

fn write_shape(to: &mut impl Write, shape: &[usize]) -> io::Result<()> {
    to.write_all(&[shape.len() as u8])?;
    shape.iter().try_for_each(|&n| write_u64(to, n as u64))
}

fn read_shape(from: &mut impl Read) -> io::Result<Vec<usize>> {
    let rank = read_u8(from)?;
    (0..rank)
        .map(|_| read_u64(from).map(|n| n as usize))
        .collect()
}

fn write_u64(to: &mut impl Write, number: u64) -> io::Result<()> {
    to.write_all(&number.to_le_bytes())
}

fn read_u64(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn read_u32(from: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn read_u8(from: &mut impl Read) -> io::Result<u8> {
    let mut bytes = [0];
    from.read_exact(&mut bytes)?;
    Ok(bytes[0])
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through(parcel: &Parcel) -> (usize, Parcel) {
        let mut frames = encode(7, parcel);
        let count = frames.len();
        assert!(frames.iter().all(|frame| frame.len() <= FRAME_BYTES));
        let mut assembly = Assembly::new(count);
        // In any order.
        frames.reverse();
        for (seen, frame) in frames.into_iter().enumerate() {
            let (number, index, of) = header(&frame).unwrap();
            assert_eq!((number, of), (7, count));
            assert_eq!(assembly.take(index, frame).unwrap(), seen + 1 == count);
        }
        (count, assembly.parcel().unwrap())
    }

    #[test]
    fn tensors_arrive_bit_by_bit_and_shared_memory_travels_once() {
        let floats: Vec<f32> = (0..200_000).map(|i| i as f32 * 0.1).collect();
        let large = Tensor::from_f32(&[200, 1000], &floats);
        let tensors = vec![
            Some(Tensor::from_i64(&[2], [-1, 5])),
            None,
            Some(large.clone()),
            Some(large.reshape(&[1000, 200])),
            Some(Tensor::from_bool(&[], [true])),
            Some(Tensor::from_f32(&[0, 3], [])),
        ];
        let tag = Tag {
            minibatch: 1 << 40,
            direction: Direction::Backward,
        };
        let (frames, parcel) = through(&Parcel::Message(tag, Message::Tensors(tensors.clone())));
        assert_eq!(frames, 4, "800 kB once");
        let Parcel::Message(arrived_tag, Message::Tensors(arrived)) = parcel else {
            panic!("another parcel");
        };
        assert_eq!(arrived_tag, tag);
        for (sent, arrived) in tensors.iter().zip(&arrived) {
            match (sent, arrived) {
                (Some(sent), Some(arrived)) => {
                    assert_eq!(sent.shape(), arrived.shape());
                    assert_eq!(sent.dtype(), arrived.dtype());
                    assert_eq!(sent.raw(), arrived.raw());
                }
                (None, None) => {}
                _ => panic!("{sent:?} became {arrived:?}"),
            }
        }
        let arrived: Vec<&Tensor> = arrived.iter().flatten().collect();
        assert!(arrived[1].same_buffer(arrived[2]));
    }

    #[test]
    fn small_parcels_take_one_frame() {
        let letter = Letter {
            text: "{}".into(),
            tensors: Vec::new(),
        };
        let (frames, parcel) = through(&Parcel::Letter(4, Some(letter)));
        assert_eq!(frames, 1);
        assert!(matches!(parcel, Parcel::Letter(4, Some(l)) if l.text == "{}"));
        let (_, last) = through(&Parcel::Letter(5, None));
        assert!(matches!(last, Parcel::Letter(5, None)));
        assert!(matches!(through(&Parcel::Beat(9)), (1, Parcel::Beat(9))));
    }

    #[test]
    fn what_is_no_parcel_is_an_error() {
        assert!(header(&[0; 15]).is_err());
        let mut frames = encode(0, &Parcel::Beat(1));
        let mut cut = frames.pop().unwrap();
        cut.truncate(20);
        let mut assembly = Assembly::new(1);
        assert!(assembly.take(0, cut.clone()).unwrap());
        assert!(assembly.take(0, cut).is_err());
        assert!(assembly.parcel().is_err());
    }
}
