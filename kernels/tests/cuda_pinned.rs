//! Pinned host memory of all sizes: what the driver allocates, and what it registers.

mod gpu;

use gpu::{Random, open};
use kernels::cuda::{DeviceBuffer, PinnedBuffer};

const SIZES: [usize; 7] = [0, 1, 4097, (4 << 20) - 1, 4 << 20, (4 << 20) + 3, (200 << 20) + 8];

#[test]
fn memory_is_zero_and_is_copied_to_its_end_and_back() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(7);
    for bytes in SIZES {
        let [mut from, mut to] = [0; 2].map(|_| PinnedBuffer::new(&gpu, bytes).unwrap());
        assert!(from.len() == bytes && from.iter().all(|byte| *byte == 0), "{bytes} bytes");
        from.iter_mut().for_each(|byte| *byte = random.next() as u8);
        let device = DeviceBuffer::new(&gpu, bytes.max(1)).unwrap();
        let span = device.span();
        // SAFETY: both buffers have `bytes`, and live until the wait.
        unsafe {
            q.upload(span, from.as_ptr(), bytes).unwrap();
            q.download(to.as_mut_ptr(), span, bytes).unwrap();
        }
        q.wait().unwrap();
        assert!(from[..] == to[..], "{bytes} bytes");
    }
}

#[test]
fn the_gpu_writes_to_it_directly() {
    let Some((gpu, q)) = open() else { return };
    for bytes in SIZES.into_iter().filter(|&bytes| bytes > 0) {
        let (source, target) = (PinnedBuffer::new(&gpu, bytes).unwrap(), PinnedBuffer::new(&gpu, bytes).unwrap());
        let device = DeviceBuffer::from_slice(&gpu, &vec![0xA5_u8; bytes]).unwrap();
        q.copy(target.span(), device.span()).unwrap();
        q.copy(device.span(), source.span()).unwrap();
        q.wait().unwrap();
        assert!(target.iter().all(|byte| *byte == 0xA5), "{bytes} bytes");
        assert!(device.span().read::<u8>(bytes).unwrap().iter().all(|byte| *byte == 0), "{bytes} bytes");
    }
}
